"""Batches by number: what a training step reads is a function of the seed and the step."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from anyformer.data.batch import IGNORE, PADDING, Batch, Piece, Row, collate, plan_packed, plan_padded
from anyformer.recipe import Crops, Ordered, Packed, Padded


class Place(NamedTuple):
    """Where reading goes on: an epoch, and a batch within it."""

    epoch: int = 0
    batch: int = 0


class Loader(Protocol):
    """Gives the batch at a place, and the place after it."""

    def read(self, place: Place) -> tuple[Batch, Place]: ...


class PieceLoader:
    """Examples in shuffled epochs, padded or packed."""

    def __init__(self, pieces: Sequence[Piece], spec: Padded | Packed, seed: int, pad: int, source_pad: int):
        self.pieces, self.spec, self.seed, self.pad, self.source_pad = pieces, spec, seed, pad, source_pad
        self.sizes = np.array([[len(p.ids), len(p.source or ())] for p in pieces], dtype=np.int64)
        self._plan: tuple[int, list[list[Row]]] | None = None

    def plan(self, epoch: int) -> list[list[Row]]:
        if self._plan is None or self._plan[0] != epoch:
            self._plan = epoch, self._make(epoch)
        return self._plan[1]

    def _make(self, epoch: int) -> list[list[Row]]:
        if isinstance(self.spec, Packed):
            return plan_packed(self.sizes, self.spec.tokens, self.spec.length, self.seed, epoch)
        return plan_padded(self.sizes, self.spec.tokens, self.spec.pool, self.seed, epoch)

    def read(self, place: Place) -> tuple[Batch, Place]:
        plan = self.plan(place.epoch)
        after = Place(place.epoch, place.batch + 1)
        width = self.spec.length if isinstance(self.spec, Packed) else None
        batch = collate(plan[place.batch], self.pieces, self.pad, self.source_pad, width)
        return batch, Place(place.epoch + 1, 0) if after.batch == len(plan) else after


class CropLoader:
    """Random pieces of one long text, each batch from a generator of its own."""

    def __init__(self, ids: np.ndarray, spec: Crops, seed: int):
        self.ids, self.spec, self.seed = ids, spec, seed

    def read(self, place: Place) -> tuple[Batch, Place]:
        generator = np.random.Generator(np.random.PCG64([self.seed, place.epoch, place.batch]))
        starts = generator.integers(0, len(self.ids) - self.spec.length, size=self.spec.rows)
        at = starts[:, None] + np.arange(self.spec.length + 1)
        cut = torch.from_numpy(self.ids[at].astype(np.int64))
        return Batch(cut[:, :-1], cut[:, 1:], None, examples=tuple(starts.tolist())), Place(0, place.batch + 1)


class OrderedLoader:
    """A long text in equal parts side by side, from beginning to end; what does not fill a batch is left out."""

    def __init__(self, ids: np.ndarray, spec: Ordered):
        self.spec, self.part = spec, (len(ids) - 1) // spec.rows
        self.starts = np.arange(spec.rows) * self.part
        self.ids, self.count = ids, self.part // spec.length

    def read(self, place: Place) -> tuple[Batch, Place]:
        starts = self.starts + place.batch * self.spec.length
        cut = torch.from_numpy(self.ids[starts[:, None] + np.arange(self.spec.length + 1)].astype(np.int64))
        batch = Batch(cut[:, :-1], cut[:, 1:], None, examples=tuple(starts.tolist()), follows=place.batch > 0)
        last = place.batch + 1 == self.count
        return batch, Place(place.epoch + 1, 0) if last else Place(place.epoch, place.batch + 1)


def side_by_side(ids: np.ndarray, rows: int, length: int) -> list[Batch]:
    """Every token but the first of a text asked once: its parts side by side, in pieces that follow each other."""
    part = -(-(len(ids) - 1) // rows)
    at = torch.arange(rows)[:, None] * part + torch.arange(part)
    there, text = at < len(ids) - 1, torch.from_numpy(ids.astype(np.int64))
    at = at.clamp(max=len(ids) - 2)
    segments = None if bool(there.all()) else torch.where(there, 0, PADDING)
    labels, text = torch.where(there, text[at + 1], IGNORE), text[at]

    def piece(start: int) -> Batch:
        cut = slice(start, start + length)
        return Batch(text[:, cut], labels[:, cut], None if segments is None else segments[:, cut], follows=start > 0)

    return [piece(start) for start in range(0, part, length)]


def in_order(pieces: Sequence[Piece], tokens: int, pad: int, source_pad: int) -> list[Batch]:
    """All examples once, for evaluation: longest first, so that running out of memory shows at once."""
    order = sorted(range(len(pieces)), key=lambda i: -pieces[i].length)
    batches, rows = [], list[Row]()
    for i in order:
        if rows and (len(rows) + 1) * pieces[rows[0][0]].length > tokens:
            batches.append(rows)
            rows = []
        rows.append((i,))
    return [collate(b, pieces, pad, source_pad) for b in [*batches, rows] if b]
