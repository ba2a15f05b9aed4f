"""Batches by number: what a training step reads is a function of the seed and the step."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from anyformer.conventions import IGNORE, PADDING, next_power_of_two
from anyformer.data.batch import (
    Batch,
    Draft,
    Example,
    ExampleTable,
    Plan,
    Planning,
    Row,
    collate,
    lay,
    plan_packed,
    plan_padded,
)
from anyformer.data.shards import Stream
from anyformer.recipe import Crops, Ordered, Packed, Padded


class Cursor(NamedTuple):
    """Where reading goes on: an epoch, and a batch within it."""

    epoch: int = 0
    batch: int = 0


class Loader(Protocol):
    """Gives the batch at a place, and the place after it."""

    def read(self, place: Cursor) -> tuple[Batch, Cursor]: ...


class ExampleLoader:
    """Examples in shuffled epochs, padded or packed. With weights, each is read as often in an epoch as its weight
    says; of a fraction, by chance."""

    def __init__(
        self,
        pieces: Sequence[Example],
        spec: Padded | Packed,
        seed: int,
        pad: int,
        source_pad: int,
        weights: Sequence[float] | None = None,
    ):
        self.weights = None if weights is None else np.asarray(weights)
        self.pieces, self.spec, self.seed, self.pad, self.source_pad = (
            ExampleTable.of(pieces),
            spec,
            seed,
            pad,
            source_pad,
        )
        self.sizes = self.pieces.sizes
        self.rows = 2 if "pair" in self.pieces.columns else 1  # of an example, on one side of a batch
        self._drafts: dict[int, Draft] = {}  # of the epoch that is read, and of the next

    def plan(self, epoch: int) -> Plan:
        return self._draft(epoch).plan()

    def _draft(self, epoch: int) -> Draft:
        if epoch not in self._drafts:
            self._drafts = {e: draft for e, draft in self._drafts.items() if e == epoch - 1}
            self._drafts[epoch] = Draft(self._make(epoch))
        return self._drafts[epoch]

    def _make(self, epoch: int) -> Planning:
        if self.weights is None:
            return (yield from self._planned(self.sizes, epoch))
        chance = np.random.Generator(np.random.PCG64([self.seed, epoch, 2])).random(len(self.weights))
        chosen = np.repeat(np.arange(len(self.weights)), np.floor(self.weights + chance).astype(np.int64))
        if not len(chosen):  # all weights are small, and chance chose none
            chosen = np.array([self.weights.argmax()])
        plan = yield from self._planned(self.sizes[chosen], epoch)
        return [[tuple(chosen[list(row)].tolist()) for row in b] for b in plan]

    def _planned(self, sizes: np.ndarray, epoch: int) -> Planning:
        if isinstance(self.spec, Packed):
            return plan_packed(sizes, self.spec.tokens, self.spec.length, self.seed, epoch)
        return plan_padded(sizes * self.rows, self.spec.tokens, self.spec.pool, self.seed, epoch)

    def read(self, place: Cursor) -> tuple[Batch, Cursor]:
        plan = self.plan(place.epoch)
        after = Cursor(place.epoch, place.batch + 1)
        width = self.spec.length if isinstance(self.spec, Packed) else None
        rows = plan[place.batch]
        if isinstance(self.spec, Packed):  # the last batch is as large as all: a GPU's programs are made for one shape
            rows = rows + [()] * (self.spec.tokens // self.spec.length - len(rows))
        most = self.documents if isinstance(self.spec, Packed) else 0
        made = self.made(np.array([i for row in rows for i in row]), place.epoch)
        batch = lay(rows, made, self.pad, self.source_pad, width, most)
        # bit by bit: all of the next epoch at once would keep a GPU waiting
        self._draft(place.epoch + 1).go_on(after.batch / len(plan))
        return batch, Cursor(place.epoch + 1, 0) if after.batch == len(plan) else after

    @cached_property
    def documents(self) -> int:
        """In a batch, with some room: as good as always the same number."""
        first = self._drafts.get(0) or Draft(self._make(0))
        return next_power_of_two(int(1.1 * max(sum(map(len, rows)) for rows in first.plan())))

    def made(self, numbers: np.ndarray, epoch: int) -> ExampleTable:
        """Some examples as they are in an epoch."""
        return self.pieces.take(numbers)


class CropLoader:
    """Random pieces of one long text, each batch from a generator of its own."""

    def __init__(self, ids: Stream, spec: Crops, seed: int):
        self.ids, self.spec, self.seed = ids, spec, seed

    def read(self, place: Cursor) -> tuple[Batch, Cursor]:
        generator = np.random.Generator(np.random.PCG64([self.seed, place.epoch, place.batch]))
        starts = generator.integers(0, len(self.ids) - self.spec.length, size=self.spec.rows)
        cut = torch.from_numpy(self.ids.cut(starts, self.spec.length + 1))
        return Batch(cut[:, :-1], cut[:, 1:], None, examples=tuple(starts.tolist())), Cursor(0, place.batch + 1)


class OrderedLoader:
    """A long text in equal parts side by side, from beginning to end; what does not fill a batch is left out."""

    def __init__(self, ids: Stream, spec: Ordered):
        self.spec, self.part = spec, (len(ids) - 1) // spec.rows
        self.starts = np.arange(spec.rows) * self.part
        self.ids, self.count = ids, self.part // spec.length

    def read(self, place: Cursor) -> tuple[Batch, Cursor]:
        starts = self.starts + place.batch * self.spec.length
        cut = torch.from_numpy(self.ids.cut(starts, self.spec.length + 1))
        batch = Batch(cut[:, :-1], cut[:, 1:], None, examples=tuple(starts.tolist()), follows=place.batch > 0)
        last = place.batch + 1 == self.count
        return batch, Cursor(place.epoch + 1, 0) if last else Cursor(place.epoch, place.batch + 1)


def side_by_side(ids: Stream, rows: int, length: int) -> Iterator[Batch]:
    """Every token but the first of a text asked once: its parts side by side, in pieces that follow each other."""
    asked = len(ids) - 1
    part = -(-asked // rows)
    for begin in range(0, part, length):
        width = min(length, part - begin)
        starts = np.arange(rows) * part + begin
        first = np.minimum(starts, asked - width)  # the last parts may end early: the rest of them is padding
        cut = torch.from_numpy(ids.cut(first, width + 1))
        at = torch.from_numpy(starts)[:, None] + torch.arange(width)
        there = at < asked
        at = at.clamp(max=asked - 1) - torch.from_numpy(first)[:, None]
        labels = torch.where(there, cut.gather(1, at + 1), IGNORE)
        segments = None if rows * part == asked else torch.where(there, 0, PADDING)
        yield Batch(cut.gather(1, at), labels, segments, follows=begin > 0)


def windows(ids: Stream, length: int, rows: int) -> Iterator[Batch]:
    """Every token but the first of a text asked once, in windows; what does not fill one is a batch of its own."""
    whole, rest = divmod(len(ids) - 1, length)
    for first in range(0, whole, rows):
        cut = torch.from_numpy(ids.cut(np.arange(first, min(first + rows, whole)) * length, length + 1))
        yield Batch(cut[:, :-1], cut[:, 1:], None)
    if rest:
        cut = torch.from_numpy(ids.cut(np.array([whole * length]), rest + 1))
        yield Batch(cut[:, :-1], cut[:, 1:], None)


def in_order(pieces: Sequence[Example], tokens: int, pad: int, source_pad: int) -> list[Batch]:
    """All examples once, for evaluation: longest first, so that running out of memory shows at once."""
    shelf = ExampleTable.of(pieces)
    lengths = shelf.sizes.max(axis=1).tolist()
    batches, rows = [], list[Row]()
    for i in sorted(range(len(shelf)), key=lambda i: -lengths[i]):
        if rows and (len(rows) + 1) * lengths[rows[0][0]] > tokens:
            batches.append(rows)
            rows = []
        rows.append((i,))
    return [collate(b, shelf, pad, source_pad) for b in [*batches, rows] if b]
