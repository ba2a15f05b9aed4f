"""Training a model with memory: a text in order, a past that goes on, and a run that can be stopped at any moment."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.attention.cache.segment_memory import Past
from anyformer.config import ConfigError, io
from anyformer.data.loader import Cursor, OrderedLoader, parallel_parts
from anyformer.data.readers import Rows
from anyformer.data.shards import InMemory
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Cosine, Ordered, Recipe
from anyformer.tasks.lm import LanguageModelling
from anyformer.training.checkpoint import checkpoints
from anyformer.training.loop import Interrupted, fit
from anyformer.training.parallel import Ranks
from anyformer.training.plan import plan
from anyformer.training.prepare import prepare
from anyformer.training.step import TrainingStep
from tests.training.small import Watched, assert_same_run, interrupt, make, pairs, quiet, run, text

ORDERED = Ordered(rows=4, length=16)  # ten batches of the text


def recalling(folder: Path, memory: int = 24, **train: Any) -> Recipe:
    recipe = text(folder, ORDERED, **train)
    return io.override(recipe, [f"model.decoder.memory={memory}", "model.decoder.depth=2"])


# -- the text in order ------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 30))
def test_an_epoch_is_the_text(rows: int, length: int, more: int) -> None:
    """Every row goes on where it ended, labels are the next tokens, and rows together are the text but for its end."""
    ids = np.arange(rows * length + 1 + more, dtype=np.int32)
    loader, place, read = OrderedLoader(InMemory(ids), Ordered(rows=rows, length=length)), Cursor(), []
    while place.epoch == 0:
        batch, after = loader.read(place)
        assert batch.follows_previous == (place.batch > 0)
        assert torch.equal(batch.labels, batch.ids + 1)
        read.append(batch.ids)
        place = after
    streams = torch.cat(read, dim=1)
    assert torch.equal(streams, streams[:, :1] + torch.arange(streams.shape[1]))
    starts = streams[:, 0].tolist()
    assert starts == [r * (starts[1] if rows > 1 else 0) for r in range(rows)]
    assert streams.numel() > len(ids) - 1 - rows * length - rows
    assert place == Cursor(1, 0)
    again, _ = loader.read(place)
    assert torch.equal(again.ids, read[0])
    assert not again.follows_previous


@given(st.integers(2, 60), st.integers(1, 5), st.integers(1, 7))
def test_side_by_side_asks_for_every_token_once(count: int, rows: int, length: int) -> None:
    ids = np.arange(count, dtype=np.int32)
    batches = list(parallel_parts(InMemory(ids), rows, length))
    asked = torch.cat([batch.labels[batch.labels != IGNORE] for batch in batches])
    assert asked.sort().values.tolist() == list(range(1, count))
    for batch in batches:
        there = batch.labels != IGNORE
        assert torch.equal(batch.ids[there] + 1, batch.labels[there])
        assert batch.segments is None or torch.equal(batch.segments == 0, there)
    assert [batch.follows_previous for batch in batches] == [False] + [True] * (len(batches) - 1)


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_reads_on(tmp_path: Path) -> None:
    """A memory that holds all of a text gives the loss of reading it at once; without it, that of its windows."""
    found = run(recalling(tmp_path, memory=200, steps=3), tmp_path / "run")
    rows = Rows({"text": ["the quick brown fox jumps over the lazy dog again and again"]}, "text.txt", range(1, 2))
    assert isinstance(found.task, LanguageModelling)
    stream = torch.tensor([found.task.encode(rows)[0]])
    with torch.no_grad():
        logits = found.model(stream[:, :-1])[0]
    expected = torch.nn.functional.cross_entropy(logits, stream[0, 1:]).item()
    metrics = found.task.evaluate(found.model, rows, Ordered(rows=1, length=7))
    assert metrics.count == stream.shape[1] - 1
    assert metrics.values["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics.notes == {"window": 7, "memory": 200}
    assert found.predict(["the lazy"])[0].startswith("the lazy")


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_the_past_goes_on_and_ends_with_the_epoch(tmp_path: Path) -> None:
    job = make(recalling(tmp_path, steps=1), tmp_path / "run")
    assert isinstance(job.loader, OrderedLoader)
    place, lengths = Cursor(), []
    for _ in range(job.loader.count + 1):
        batch, place = job.loader.read(place)
        TrainingStep(job)([batch])
        assert isinstance(job.state.segment_memory, Past)
        lengths.append(int((job.state.segment_memory.segments[0] >= 0).sum()))
    assert lengths == [min(24, 16 * n) for n in range(1, job.loader.count + 1)] + [16]


def test_the_batches_of_one_step_follow_each_other(tmp_path: Path) -> None:
    job = make(recalling(tmp_path, steps=1), tmp_path / "run")
    first, place = job.loader.read(Cursor())
    second, _ = job.loader.read(place)
    TrainingStep(job)([first, second])
    assert job.state.segment_memory is not None
    assert job.state.segment_memory.positions[0].tolist() == list(range(8, 32))


def test_a_bad_step_forgets(tmp_path: Path) -> None:
    """What it would go on from may not be finite."""
    job = make(recalling(tmp_path, steps=4), tmp_path / "run")
    hook = job.model.register_forward_hook(_poisoned(at=2))
    fit(job)
    hook.remove()
    assert job.state.bad_in_all == 1
    assert job.state.segment_memory is not None
    assert all(x.isfinite().all() for x in job.state.segment_memory.layers)


def _poisoned(at: int) -> Any:
    calls = 0

    def poison(module: torch.nn.Module, args: Any, out: Any) -> Any:
        nonlocal calls
        calls += module.training
        if calls != at or not module.training:
            return out
        logits, past = out
        return logits * torch.nan, past._replace(layers=tuple(x * torch.nan for x in past.layers))

    return poison


HARD = {"accumulate": 2, "ema": 0.9, "schedule": Cosine(warmup=3), "evaluate_every": 5, "save_every": 4, "steps": 12}


@pytest.mark.parametrize("batch", [3, 11, 22])
def test_a_signal_changes_nothing(tmp_path: Path, batch: int) -> None:
    """Within an epoch, and at its end: the past is part of the state."""
    recipe = recalling(tmp_path, **HARD)
    run(recipe, tmp_path / "whole")
    job = make(recipe, tmp_path / "stopped")
    job.loader = Watched(job.loader, batch, interrupt)
    with pytest.raises(Interrupted):
        fit(job)
    assert checkpoints(tmp_path / "stopped")
    run(recipe, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_plan_of_it(tmp_path: Path) -> None:
    found = plan(recalling(tmp_path, steps=20), quiet())
    assert "ordered, on average 4 rows of 16 tokens" in found.render()
    assert found.epochs == 2.0


def test_without_memory_nothing_is_kept(tmp_path: Path) -> None:
    job = make(recalling(tmp_path, memory=0, steps=2), tmp_path / "run")
    fit(job)
    assert job.state.segment_memory is None


# -- what is refused --------------------------------------------------------------------------------------------------


def test_other_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"batches\.kind = 'crops': a model with memory continues from batch to batch"
    ):
        io.override(text(tmp_path), ["model.decoder.memory=4"])
    with pytest.raises(ConfigError, match=r"batches\.kind = 'ordered': crops of one long text are for the task lm"):
        pairs(batches=ORDERED)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    recipe = io.override(recalling(tmp_path), ["batches.rows=50"])
    with pytest.raises(
        ConfigError, match=r"batches\.rows = 50: with length = 16 it needs 801 tokens, and the text has"
    ):
        make(recipe, tmp_path / "run")


def test_several_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.decoder\.memory = 24: the memory of a batch is held by one process"):
        prepare(recalling(tmp_path), tmp_path / "run", False, quiet(), Ranks(rank=0, size=2))
