"""Examples that are drawn anew each time from texts: where it is masked, or cut, is another matter in every epoch.

What is drawn of a text depends on the seed, the epoch and the text's number, and on nothing else; how long it becomes
on the length of the text alone. So plans, too, stay functions of lengths, and resuming needs no replay.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import PCG64, Generator

from anyformer.data.batch import Batch, Ids, Piece, Shelf, collate
from anyformer.data.loader import CropLoader, PieceLoader, Place
from anyformer.data.shards import Stream
from anyformer.recipe import Crops, Packed, Padded

Draw = Callable[[Ids, Generator], Piece]


class DrawnLoader(PieceLoader):
    """Texts in shuffled epochs, padded or packed, each as it is drawn in that epoch."""

    def __init__(
        self, texts: Sequence[Ids], draw: Draw, spec: Padded | Packed, seed: int, pad: int, source_pad: int = 0
    ):
        super().__init__([], spec, seed, pad, source_pad)
        self.texts, self.draw = texts, draw
        _, which, same = np.unique([len(ids) for ids in texts], return_index=True, return_inverse=True)
        self.sizes = Shelf.of([draw(texts[i], Generator(PCG64(0))) for i in which]).sizes[same]  # one of each length

    def made(self, numbers: np.ndarray, epoch: int) -> Shelf:
        return Shelf.of([self.draw(self.texts[i], Generator(PCG64([self.seed, epoch, i]))) for i in numbers])


class DrawnCrops(CropLoader):
    """Random crops of one long text, each drawn when it is read; in the spec, `length` is of the text itself."""

    def __init__(self, ids: Stream, draw: Draw, spec: Crops, seed: int, pad: int, source_pad: int = 0):
        super().__init__(ids, spec, seed)
        self.draw, self.pad, self.source_pad = draw, pad, source_pad

    def read(self, place: Place) -> tuple[Batch, Place]:
        generator = Generator(PCG64([self.seed, place.epoch, place.batch]))
        starts = generator.integers(0, len(self.ids) - self.spec.length + 1, size=self.spec.rows)
        pieces = [self.draw(ids, generator) for ids in self.ids.cut(starts, self.spec.length).tolist()]
        batch = collate([(i,) for i in range(len(pieces))], pieces, self.pad, self.source_pad)
        return batch._replace(examples=tuple(starts.tolist())), Place(0, place.batch + 1)


def drawn(texts: Sequence[Ids], draw: Draw, first: int = 0) -> list[Piece]:
    """Each text as it is drawn in every evaluation, by its number."""
    return [draw(ids, Generator(PCG64([0, i]))) for i, ids in enumerate(texts, first)]
