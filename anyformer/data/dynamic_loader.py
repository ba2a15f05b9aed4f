"""Examples that are drawn anew each time from texts: where it is masked, or cut, is another matter in every epoch.

What is drawn of a text depends on the seed, the epoch and the text's number, and on nothing else; how long it becomes
on the length of the text alone. So plans, too, stay functions of lengths, and resuming needs no replay. All texts of a
batch are drawn at once, by numbers that are counted instead of generated one after the other (`data/counter_rng.py`).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import PCG64, Generator

from anyformer.data.batch import Batch, ExampleTable, Ids, Ragged, joined, lay
from anyformer.data.counter_rng import CounterRNG
from anyformer.data.loader import CropLoader, Cursor, ExampleLoader
from anyformer.data.shards import Stream
from anyformer.recipe import Crops, Packed, Padded

Draw = Callable[[Ragged, CounterRNG], ExampleTable]


class DynamicLoader(ExampleLoader):
    """Texts in shuffled epochs, padded or packed, each as it is drawn in that epoch."""

    def __init__(
        self, texts: Sequence[Ids], draw: Draw, spec: Padded | Packed, seed: int, pad: int, source_pad: int = 0
    ):
        super().__init__([], spec, seed, pad, source_pad)
        self.texts, self.draw = joined(texts), draw
        _, which, same = np.unique(self.texts.sizes, return_index=True, return_inverse=True)
        self.sizes = draw(self.texts.take(which), CounterRNG(which)).sizes[same]  # one of each length is drawn

    def made(self, numbers: np.ndarray, epoch: int) -> ExampleTable:
        return self.draw(self.texts.take(numbers), CounterRNG(numbers, self.seed, epoch))


class DrawnCrops(CropLoader):
    """Random crops of one long text, each drawn when it is read; in the spec, `length` is of the text itself."""

    def __init__(self, ids: Stream, draw: Draw, spec: Crops, seed: int, pad: int, source_pad: int = 0):
        super().__init__(ids, spec, seed)
        self.draw, self.pad, self.source_pad = draw, pad, source_pad

    def read(self, place: Cursor) -> tuple[Batch, Cursor]:
        generator = Generator(PCG64([self.seed, place.epoch, place.batch]))
        rows, length = self.spec.rows, self.spec.length
        starts = generator.integers(0, len(self.ids) - length + 1, size=rows)
        texts = Ragged(self.ids.cut(starts, length).ravel(), np.full(rows, length))
        shelf = self.draw(texts, CounterRNG(np.arange(rows), self.seed, place.epoch, place.batch))
        batch = lay([(start,) for start in starts.tolist()], shelf, self.pad, self.source_pad)
        return batch, Cursor(0, place.batch + 1)


def drawn(texts: Sequence[Ids], draw: Draw, first: int = 0) -> ExampleTable:
    """Each text as it is drawn in every evaluation, by its number."""
    return draw(joined(texts), CounterRNG(np.arange(first, first + len(texts))))
