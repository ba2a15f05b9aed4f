"""Plans hold every example once and within the budget, tensors hold what the examples say, and padding is rare."""

import os
from itertools import chain, combinations, product
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.data.batch import Batch, Example, ExampleTable, Ragged, collate
from anyformer.data.batch_plan import GradualPlan, Plan, PlanSteps, Row, plan_packed, plan_padded
from anyformer.data.loader import CropLoader, Cursor, ExampleLoader, longest_first
from anyformer.data.shards import InMemory
from anyformer.kernels.conventions import IGNORE, PADDING
from anyformer.recipe import Crops, Packed, Padded

PAD, SOURCE_PAD = 91, 92
MULTI30K = Path(os.environ.get("ANYFORMER_DATA", "nowhere")) / "multi30k"

seeds = st.integers(0, 2**31)


@st.composite
def examples(draw: st.DrawFn, longest: int = 12) -> list[Example]:
    """Pairs for an encoder–decoder, or single sequences; every id says whose it is."""
    pairs = draw(st.booleans())
    sizes = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(1, longest)), min_size=1, max_size=60))

    def ids(kind: int, example: int, count: int) -> list[int]:
        return [1000 * kind + 100_000 * example + at for at in range(count)]

    return [Example(ids(1, i, t), ids(2, i, t), ids(3, i, s) if pairs else None) for i, (t, s) in enumerate(sizes)]


specs = st.one_of(
    st.builds(Padded, tokens=st.integers(12, 100), pool=st.integers(1, 5)),
    st.builds(Packed, tokens=st.integers(24, 100), length=st.integers(12, 24)),
)


def loader(pieces: list[Example], spec: Padded | Packed, seed: int = 0) -> ExampleLoader:
    return ExampleLoader(pieces, spec, seed, PAD, SOURCE_PAD)


def epoch_of(made: ExampleLoader, epoch: int = 0) -> list[Batch]:
    batches, place = [], Cursor(epoch, 0)
    while place.epoch == epoch:
        batch, place = made.read(place)
        batches.append(batch)
    return batches


@given(examples(), specs, seeds, st.integers(0, 3))
def test_an_epoch_holds_every_example_once_and_within_the_budget(
    pieces: list[Example], spec: Padded | Packed, seed: int, epoch: int
) -> None:
    batches = epoch_of(loader(pieces, spec, seed), epoch)
    assert sorted(i for batch in batches for i in batch.examples) == list(range(len(pieces)))
    for batch in batches:
        assert batch.ids.numel() <= spec.tokens
        assert batch.source is None or batch.source.numel() <= spec.tokens
        if isinstance(spec, Packed):
            assert batch.ids.shape == (spec.tokens // spec.length, spec.length)  # the last batch, too
            assert batch.segments is not None
            assert batch.documents >= len(batch.examples)
    assert sum(batch.tokens for batch in batches) == sum(len(p.ids) + len(p.source or ()) for p in pieces)


@given(examples(), specs, seeds)
def test_the_order_is_of_seed_and_epoch_alone(pieces: list[Example], spec: Padded | Packed, seed: int) -> None:
    made = loader(pieces, spec, seed)
    told = [[batch.examples for batch in epoch_of(made, epoch)] for epoch in range(3)]
    for epoch in (2, 0, 1):  # begun anywhere, by a reader that has read nothing else
        fresh = loader(pieces, spec, seed)
        for number in reversed(range(len(told[epoch]))):
            assert fresh.read(Cursor(epoch, number))[0].examples == told[epoch][number]


@pytest.mark.parametrize("spec", [Padded(tokens=64), Packed(tokens=64, length=32)])
def test_epochs_and_seeds_differ(spec: Padded | Packed) -> None:
    pieces = [Example([1] * (1 + i % 7), [1] * (1 + i % 7)) for i in range(100)]
    orders = {tuple(b.examples for b in epoch_of(loader(pieces, spec, seed), e)) for seed in (0, 1) for e in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize("spec", [Padded(tokens=32, pool=2), Packed(tokens=64, length=32)])
def test_epochs_and_seeds_group_other_examples(spec: Padded | Packed) -> None:
    """Which examples share a row, or a batch of padded rows, is drawn anew: few groups are there twice."""
    pieces = [Example([1] * (1 + i % 7), [1] * (1 + i % 7)) for i in range(400)]
    groups = []
    for seed, epoch in product((0, 1), (0, 1)):
        plan = loader(pieces, spec, seed).plan(epoch)
        rows = chain.from_iterable(plan) if isinstance(spec, Packed) else (sum(batch, ()) for batch in plan)
        groups.append({frozenset(row) for row in rows if len(row) > 1})
    for one, other in combinations(groups, 2):
        assert len(one & other) < 0.02 * min(len(one), len(other))


def test_the_next_epoch_is_planned_while_one_is_read() -> None:
    """Some of it with every batch."""
    made = loader([Example([1] * (1 + i % 7), [1] * (1 + i % 7)) for i in range(2000)], Packed(tokens=64, length=16))
    steps: list[float] = []

    def watched(planning: PlanSteps) -> PlanSteps:
        while True:
            try:
                steps.append(next(planning))
            except StopIteration as end:
                return cast(Plan, end.value)
            yield steps[-1]

    count, draft = len(made.plan(0)), made._gradual_plan(1)
    draft._steps = watched(draft._steps)
    for number in range(count):
        made.read(Cursor(0, number))
        assert len(steps) == 0 or steps[-1] <= (number + 1) / count + 0.1  # a round is not cut
    done = len(steps)
    assert steps[-1] > 0.9
    assert made.plan(1) == loader(list(made.table), made.spec).plan(1)
    assert len(steps) == done  # nothing was left to do


@given(examples(), st.integers(12, 24), seeds)
def test_both_sides_of_a_packed_row_fit(pieces: list[Example], length: int, seed: int) -> None:
    sizes = np.array([[len(p.ids), len(p.source or ())] for p in pieces])
    for row in (row for batch in GradualPlan(plan_packed(sizes, 4 * length, length, seed, 0)).plan() for row in batch):
        assert (sizes[list(row)].sum(axis=0) <= length).all()


@given(examples(), specs, seeds)
def test_tensors_hold_what_the_examples_say(pieces: list[Example], spec: Padded | Packed, seed: int) -> None:
    made = loader(pieces, spec, seed)
    for batch, rows in zip(epoch_of(made), made.plan(0), strict=True):
        assert batch.examples == tuple(i for row in rows for i in row)
        for r, row in enumerate(rows):
            for segment, i in enumerate(row):
                where = slice(None) if batch.segments is None else batch.segments[r] == segment
                assert batch.ids[r, where].tolist() == list(pieces[i].ids)
                assert batch.labels[r, where].tolist() == list(pieces[i].labels)
                if batch.source is not None:  # the same segment on both sides: that is who sees whom
                    assert batch.source_segments is not None
                    assert batch.source[r, batch.source_segments[r] == segment].tolist() == list(pieces[i].source or ())
            for ids, segments, filler in (
                (batch.ids, batch.segments, PAD),
                (batch.labels, batch.segments, IGNORE),
                (batch.source, batch.source_segments, SOURCE_PAD),
            ):
                if ids is not None and segments is not None:
                    assert set(segments[r].tolist()) <= {PADDING, *range(len(row))}
                    assert (ids[r, segments[r] == PADDING] == filler).all()
        assert batch.target_count == sum(len(pieces[i].labels) for i in batch.examples)


@given(examples(), st.data())
def test_a_shelf_gives_back_what_was_put_on_it(pieces: list[Example], data: st.DataObject) -> None:
    shelf, who = ExampleTable.of(pieces), data.draw(st.lists(st.integers(0, len(pieces) - 1)))
    assert list(shelf) == pieces
    assert shelf[-1] == pieces[-1]
    assert list(shelf.take(np.array(who, dtype=np.int64))) == [pieces[i] for i in who]
    assert shelf.sizes.max(axis=1).tolist() == [piece.length for piece in pieces]


few = st.lists(st.integers(0, 9), max_size=3)


@given(st.lists(few, min_size=1, max_size=9), few, few)
def test_a_frame_stands_around_each(texts: list[list[int]], before: list[int], after: list[int]) -> None:
    framed = Ragged.of(texts).framed(before, after)
    assert [framed.sequence(i).tolist() for i in range(len(texts))] == [[*before, *ids, *after] for ids in texts]


def test_a_full_batch_has_no_segments_and_one_side_never_goes_without_the_other() -> None:
    rows: list[Row] = [(0,), (1,)]
    assert collate(rows, [Example([1, 2], [2, 3]), Example([4, 5], [5, 6])], PAD, SOURCE_PAD).segments is None
    half = collate(rows, [Example([1, 2], [2, 3], [7]), Example([4, 5], [5, 6], [8, 9])], PAD, SOURCE_PAD)
    assert half.segments is not None
    assert half.source_segments is not None
    assert half.segments.tolist() == [[0, 0], [0, 0]]
    assert half.source_segments.tolist() == [[0, PADDING], [0, 0]]


@given(examples(), st.integers(1, 60))
def test_evaluation_sees_every_example_once(pieces: list[Example], tokens: int) -> None:
    batches = longest_first(pieces, tokens, PAD, SOURCE_PAD)
    assert sorted(i for batch in batches for i in batch.examples) == list(range(len(pieces)))
    assert all(batch.ids.numel() <= tokens or len(batch.ids) == 1 for batch in batches)


# -- padding ----------------------------------------------------------------------------------------------------------


def share_of_padding(sizes: np.ndarray, plan: list[list[Row]], width: int | None = None) -> float:
    real, slots, sides = 0, 0, sizes.shape[1]
    for rows in plan:
        sums = np.array([sizes[list(row)].sum(axis=0) for row in rows])  # [rows, sides]
        real += int(sums.sum())
        slots += len(rows) * (sides * width if width else int(sums.max(axis=0).sum()))
    return 1 - real / slots


def like_multi30k(count: int) -> np.ndarray:
    """Captions: 16 tokens in German and 15 in English on average, spread like a log-normal, correlated by 0.87."""
    generator = np.random.default_rng(0)
    shared, own = generator.normal(size=(count, 1)), generator.normal(size=(count, 2))
    return np.clip(np.exp([2.71, 2.68] + 0.32 * (0.87**0.5 * shared + 0.13**0.5 * own)), 4, 60).astype(np.int64)


def test_padding_is_rare() -> None:
    sizes = like_multi30k(10_000)
    assert share_of_padding(sizes, GradualPlan(plan_padded(sizes, 4096, 50, 0, 0)).plan()) <= 0.08
    assert share_of_padding(sizes, GradualPlan(plan_packed(sizes, 4096, 256, 0, 0)).plan(), 256) <= 0.03
    alone = sizes[:, :1]
    assert share_of_padding(alone, GradualPlan(plan_packed(alone, 4096, 128, 0, 0)).plan(), 128) <= 0.02


def best_fit(sizes: np.ndarray, length: int) -> int:
    """How many rows one gets that puts each example, as they come, where the least is left."""
    room = np.empty((0, sizes.shape[1]), dtype=np.int64)
    for need in sizes:
        fits = (room >= need).all(axis=1).nonzero()[0]
        if not len(fits):
            room, fits = np.concatenate((room, np.full((1, len(need)), length))), np.array([len(room)])
        room[fits[(room[fits] - need).min(axis=1).argmin()]] -= need
    return len(room)


def two_sides(kind: str, count: int = 2000) -> np.ndarray:
    draw = np.random.default_rng(0)
    long, short = draw.integers(50, 250, count), draw.integers(5, 40, count)
    match kind:
        case "alike":
            return np.stack([long, long + draw.integers(-20, 20, count)], axis=1)
        case "apart":
            return np.stack([draw.integers(1, 257, count), draw.integers(1, 257, count)], axis=1)
        case "one is long":
            return np.stack([long, short], axis=1)
        case _:  # of half of them the one, of half the other
            return np.where(draw.random((count, 1)) < 0.5, np.stack([long, short], 1), np.stack([short, long], 1))


@pytest.mark.parametrize("kind", ["alike", "apart", "one is long", "either is long"])
def test_packing_is_nearly_as_good_as_best_fit(kind: str) -> None:
    """Which looks at all rows for each example, one after the other."""
    sizes = two_sides(kind)
    plan = GradualPlan(plan_packed(sizes, 4096, 512, 0, 0)).plan()
    assert sum(map(len, plan)) <= 1.05 * best_fit(sizes, 512)


def test_what_no_row_holds_is_told() -> None:
    with pytest.raises(ValueError, match="an example has 9 tokens, and a row holds 8"):
        GradualPlan(plan_packed(np.array([[3], [9]]), 16, 8, 0, 0)).plan()


@pytest.mark.parametrize("mean", [30, 100, 300])
def test_documents_leave_little_room(mean: int) -> None:
    """Of lengths up to a whole row, many of them more than half of one."""
    sizes = np.minimum(np.random.default_rng(0).geometric(1 / mean, (4000, 1)), 512)
    rows = [row for batch in GradualPlan(plan_packed(sizes, 4096, 512, 0, 0)).plan() for row in batch]
    bound = max(-(-sizes.sum() // 512), (sizes > 256).sum())  # two of more than half do not fit into one
    assert len(rows) <= 1.02 * bound + 1


@pytest.mark.skipif(not MULTI30K.exists(), reason="ANYFORMER_DATA names no folder with Multi30k")
def test_padding_is_rare_on_multi30k() -> None:
    """In words here: learning subwords takes longer than everything else in this file."""
    lines = [(MULTI30K / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("de", "en")]
    sizes = np.array([[len(text.split()) + 1 for text in pair] for pair in zip(*lines, strict=True)])
    bucketed = share_of_padding(sizes, GradualPlan(plan_padded(sizes, 4096, 50, 0, 0)).plan())
    packed = share_of_padding(sizes, GradualPlan(plan_packed(sizes, 4096, 256, 0, 0)).plan(), 256)
    print(f"Multi30k: {bucketed:.1%} padding in buckets, {packed:.1%} packed")
    assert bucketed <= 0.08
    assert packed <= 0.05  # in words English is 4 % longer than German, and both sides of a row are as wide


# -- crops ------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 80), st.data(), st.integers(1, 5), seeds, st.integers(0, 1000))
def test_crops_ask_for_the_next_token(count: int, data: st.DataObject, rows: int, seed: int, number: int) -> None:
    length = data.draw(st.integers(1, count - 1))
    text, spec = np.random.default_rng(seed).integers(0, 7, count).astype(np.int32), Crops(rows=rows, length=length)
    batch, after = CropLoader(InMemory(text), spec, seed).read(Cursor(0, number))
    assert after == Cursor(0, number + 1)
    assert batch.segments is None
    assert batch.ids.shape == batch.labels.shape == (rows, length)
    assert batch.ids.dtype == torch.int64
    for row, start in enumerate(batch.examples):
        assert batch.ids[row].tolist() == text[start : start + length].tolist()
        assert batch.labels[row].tolist() == text[start + 1 : start + length + 1].tolist()
    again = CropLoader(InMemory(text), spec, seed).read(Cursor(0, number))[0]
    assert torch.equal(again.ids, batch.ids)


def test_crops_reach_both_ends_of_the_text() -> None:
    made = CropLoader(InMemory(np.arange(6)), Crops(rows=64, length=4), 0)
    assert set(made.read(Cursor())[0].examples) == {0, 1}
    assert made.read(Cursor(0, 0))[0].examples != made.read(Cursor(0, 1))[0].examples
