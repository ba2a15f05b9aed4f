"""Examples that are drawn: of a text, they depend on the seed, the epoch and its number, and on no other text."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from anyformer.data.batch import Batch, Example, Ragged
from anyformer.data.counter_rng import CounterRNG
from anyformer.data.loader import Cursor, DynamicCropLoader, DynamicLoader, draw_fixed
from anyformer.data.shards import InMemory
from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import Crops, MaskedLanguageModel, Packed, Padded, PrefixLM, SpanCorruption, Words
from anyformer.tasks.dynamic_examples import DynamicExampleTask
from anyformer.tasks.lm import PrefixModelling
from anyformer.tasks.mlm import MaskedLanguageModelling
from anyformer.tasks.span_corruption import SpanCorrupting
from tests.training.small import sentences

KINDS = ("mlm", "spans", "prefix_lm")
texts_of = st.lists(st.lists(st.integers(0, 15), min_size=2, max_size=20), min_size=1, max_size=20)
seeds = st.integers(0, 2**31)


@cache
def task_of(kind: str) -> DynamicExampleTask:
    tokenizer = train_tokenizer(Words(), sentences())
    match kind:
        case "mlm":
            return MaskedLanguageModelling(MaskedLanguageModel(rate=0.3), tokenizer)
        case "spans":
            return SpanCorrupting(SpanCorruption(rate=0.4, mean_span=2.0), tokenizer.with_sentinels(4))
        case _:
            return PrefixModelling(PrefixLM(), tokenizer)


def alone(task: DynamicExampleTask, ids: Sequence[int], number: int, *seed: int) -> Example:
    found: Example = task.draw(Ragged.of([ids]), CounterRNG(np.array([number]), *seed))[0]
    return found


def pieces_of(batch: Batch) -> dict[int, Example]:
    """The examples of a batch by number, cut out of its tensors."""
    found, numbers = dict[int, Example](), iter(batch.examples)
    for row in range(len(batch.ids)):
        own = np.zeros(batch.ids.shape[1], int) if batch.segments is None else batch.segments[row].numpy()
        for n in range(own.max() + 1):
            named: dict[str, Any] = {
                "ids": batch.ids[row][own == n].tolist(),
                "labels": batch.labels[row][own == n].tolist(),
            }
            if batch.source is not None and batch.source_segments is not None:
                named["source"] = batch.source[row][batch.source_segments[row] == n].tolist()
            if batch.marks is not None:
                named["marks"] = batch.marks[row][own == n].tolist()
            found[next(numbers)] = Example(**named)
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(texts_of, seeds, st.integers(0, 3))
def test_what_is_drawn_of_a_text_depends_on_no_other(kind: str, texts: list[list[int]], seed: int, epoch: int) -> None:
    task, numbers = task_of(kind), np.random.default_rng(seed).permutation(1000)[: len(texts)]
    together = task.draw(Ragged.of(texts), CounterRNG(numbers, seed, epoch))
    assert list(together) == [alone(task, *text, seed, epoch) for text in zip(texts, numbers, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@given(texts_of, seeds)
def test_lengths_depend_on_the_length_of_a_text_alone(kind: str, texts: list[list[int]], seed: int) -> None:
    task = task_of(kind)
    found = task.draw(Ragged.of(texts), CounterRNG(np.arange(len(texts)), seed))
    others = task.draw(Ragged.of([[7] * len(ids) for ids in texts]), CounterRNG(np.arange(len(texts)), seed + 1))
    assert (found.sizes == others.sizes).all()
    assert all(len(piece.labels) == len(piece.ids) for piece in found)


@pytest.mark.parametrize("kind", KINDS)
@given(texts_of, seeds, st.booleans())
def test_batches_hold_what_is_drawn_of_each_text_alone(
    kind: str, texts: list[list[int]], seed: int, packed: bool
) -> None:
    task, spec = task_of(kind), Packed(tokens=96, length=32) if packed else Padded(tokens=96)
    loader = DynamicLoader(texts, task.draw, spec, seed, 0)
    for epoch in range(2):
        place, found = Cursor(epoch, 0), dict[int, Example]()
        while place.epoch == epoch:
            batch, place = loader.read(place)
            found |= pieces_of(batch)
        assert found == {i: alone(task, ids, i, seed, epoch) for i, ids in enumerate(texts)}


@pytest.mark.parametrize("kind", KINDS)
def test_crops_are_drawn_by_seed_batch_and_row(kind: str) -> None:
    task, text = task_of(kind), np.random.default_rng(0).integers(6, 15, 50)
    loader = DynamicCropLoader(InMemory(text), task.draw, Crops(rows=8, length=12), 5, 0)
    read = [loader.read(Cursor(0, number))[0] for number in (0, 1)]
    for number, batch in enumerate(read):
        crops = [alone(task, text[at : at + 12].tolist(), i, 5, 0, number) for i, at in enumerate(batch.examples)]
        assert batch.ids.tolist() == [list(piece.ids) for piece in crops]
        assert batch.labels.tolist() == [list(piece.labels) for piece in crops]
    assert read[0].examples != read[1].examples


@pytest.mark.parametrize("kind", KINDS)
@given(texts_of, st.data())
def test_evaluation_draws_the_same_each_time(kind: str, texts: list[list[int]], data: st.DataObject) -> None:
    """In parts as well."""
    task, cut = task_of(kind), data.draw(st.integers(0, len(texts) - 1))
    whole = draw_fixed(texts, task.draw)
    assert list(whole) == list(draw_fixed(texts, task.draw))
    assert list(whole)[cut:] == list(draw_fixed(texts[cut:], task.draw, cut))
