"""Batches by number: what a training step reads is a function of the seed and the step."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from anyformer.data.batch import Batch, Piece, Row, collate, plan_packed, plan_padded
from anyformer.recipe import Crops, Packed, Padded


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
