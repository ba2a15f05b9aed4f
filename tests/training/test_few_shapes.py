"""Batches of few shapes: each example once, within the limit, and empty rows change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.attention import attend
from anyformer.config import ConfigError, TokenLabels
from anyformer.data.batch import Batch, Example
from anyformer.data.batch_plan import MIN_BUCKET, round_lengths
from anyformer.data.loader import Cursor, EpochLoader, ExampleLoader
from anyformer.recipe import Classify, Embed, Packed, Padded, Recipe, Regress
from anyformer.training.job import Job
from anyformer.training.loop import evaluate
from anyformer.training.step import TrainingStep, can_capture
from tests.training.small import PACKED, PADDED, distances, labelled, make, pairs, parities, spellings, tagging

TOKENS = 512
FEW = Padded(tokens=TOKENS, few_shapes=True)
LENGTHS = st.lists(st.tuples(st.integers(1, TOKENS), st.integers(1, TOKENS)), min_size=1, max_size=300)


def epoch(loader: EpochLoader, number: int) -> list[Batch]:
    return [loader.read(Cursor(number, i))[0] for i in range(len(loader.plan(number)))]


def shapes(batches: list[Batch]) -> set[Any]:
    return {tuple(None if x is None else tuple(x.shape) for x in (b.ids, b.source, b.segments)) for b in batches}


@given(LENGTHS, st.integers(0, 9))
def test_shapes_are_few(lengths: list[tuple[int, int]], seed: int) -> None:
    """There is one for each rounded length, in all epochs together; examples are read once, within the limit."""
    examples = [Example([1] * target, [1] * target, [1] * source) for target, source in lengths]
    loader = ExampleLoader(examples, FEW, seed, 0, 0)
    first, second = epoch(loader, 0), epoch(loader, 1)
    assert len(shapes(first)) == loader.shapes
    assert len(shapes([*first, *second])) <= 2 * np.log2(TOKENS / MIN_BUCKET) + 1
    for batches in (first, second):
        assert sorted(i for batch in batches for i in batch.examples) == list(range(len(examples)))
        assert all(batch.ids.numel() <= TOKENS for batch in batches)
        assert sum(batch.target_count for batch in batches) == sum(target for target, _ in lengths)


@given(LENGTHS, st.integers(0, 9))
def test_shapes_are_counted(lengths: list[tuple[int, int]], seed: int) -> None:
    examples = [Example([1] * target, [1] * target, [1] * source) for target, source in lengths]
    loader = ExampleLoader(examples, Padded(tokens=TOKENS), seed, 0, 0)
    assert loader.shapes == len({(b.ids.shape, b.source.shape) for b in epoch(loader, 0) if b.source is not None})
    assert ExampleLoader(examples, Packed(tokens=TOKENS, length=TOKENS), seed, 0, 0).shapes == 1


@given(st.lists(st.integers(1, TOKENS), min_size=1))
def test_lengths_are_rounded_up_by_less_than_half(lengths: list[int]) -> None:
    rounded = round_lengths(np.array(lengths), longest := max(lengths))
    assert (rounded >= lengths).all()
    assert (rounded <= np.maximum(MIN_BUCKET, np.array(lengths) * 1.5)).all()
    assert rounded.max() == longest


RECIPES: dict[str, Callable[[Path], Recipe]] = {
    "classify": lambda folder: labelled(folder, Classify(), parities()),
    "classify, several labels": lambda folder: labelled(folder, Classify(separator=","), parities()),
    "regress": lambda folder: labelled(folder, Regress(), distances(), labels=1, types=2),
    "tag": lambda folder: tagging(folder, batches=PADDED),
    "tag, spelled, by a CRF": lambda folder: tagging(folder, head=TokenLabels(labels=3, crf=True), spelled=True),
    "decoder": lambda folder: pairs("decoder"),
    "encoder-decoder": lambda folder: pairs("encoder-decoder"),
}


def with_batches(recipe: Recipe, few: bool) -> Recipe:
    return Recipe(**{**dict(recipe), "batches": Padded(tokens=100, few_shapes=few)})


def trained(job: Job, batches: list[Batch]) -> list[Any]:
    """Return the loss, and the gradient of each weight, in a step on batches without dropout."""
    job.model.eval()
    loss = torch.zeros(())
    for batch in batches:
        arguments = job.objective.arguments(job.objective.select_labels(batch), packed=False)
        loss = loss + job.objective(*arguments, None)[0]
    loss.backward()
    return [loss.detach(), *(p.grad for p in job.model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", RECIPES)
def test_empty_rows_change_nothing(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name](tmp_path)
    one, other = (make(with_batches(recipe, few), tmp_path / str(few)) for few in (False, True))
    assert isinstance(one.loader, EpochLoader)
    assert isinstance(other.loader, EpochLoader)
    plain, filled = epoch(one.loader, 0), epoch(other.loader, 0)
    assert sum(batch.slots for batch in filled) > sum(batch.slots for batch in plain)
    for a, b in zip(trained(one, plain), trained(other, filled), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("task", [Embed(), Regress(apart=True)])
def test_tasks_that_compare_rows_have_no_empty_ones(task: Embed | Regress, tmp_path: Path) -> None:
    rows = spellings() if isinstance(task, Embed) else distances()
    with pytest.raises(ConfigError, match=r"batches.few_shapes = true: the task \w+ compares the rows of a batch"):
        with_batches(labelled(tmp_path, task, rows), few=True)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_few_shapes_are_captured_without_the_compiler(name: str, tmp_path: Path) -> None:
    """On a GPU steps of few shapes are replayed, those of many are not; a CRF loops on the CPU."""
    for few in (False, True):
        job = make(with_batches(RECIPES[name](tmp_path), few), tmp_path / str(few))
        vars(job)["steps_in_flight"] = 4  # as on a GPU
        assert not job.compiled
        assert can_capture(job) == (few and "CRF" not in name)


def test_eager_steps_and_evaluations_make_no_plans(tmp_path: Path) -> None:
    """cuDNN would make one for each new shape. Compiled steps have one shape, and may use it."""
    allowed: list[bool] = []
    original = attend._sdpa

    def spy(*arguments: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return original(*arguments)

    job = make(pairs("encoder-decoder", PACKED), tmp_path / "run")
    batch, _ = job.loader.read(Cursor())
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with mock.patch.object(attend, "_sdpa", spy):
        for compiled in (False, True):
            job.compiled = compiled
            TrainingStep(job, job.objective)([batch])
            assert {*allowed} == {compiled}
            allowed.clear()
        assert job.valid is not None
        evaluate(job, job.valid)
        assert {*allowed} == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()
