"""Loaders whose examples are drawn from texts, new ones in every epoch (dynamic masking, Liu et al. 2019).

An example depends on the seed, the epoch and the number of its text alone; its length depends on the length of the text
alone. So plans remain functions of lengths, and resuming needs no replay. All examples of a batch are drawn at once, by
a counter-based random generator (`data/counter_rng.py`).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.random import PCG64, Generator

from anyformer.data.batch import Batch, ExampleTable, Ids, Ragged, collate_rows
from anyformer.data.counter_rng import CounterRNG
from anyformer.data.loader import CropLoader, Cursor, EpochLoader
from anyformer.data.shards import Stream
from anyformer.recipe import Crops, Packed, Padded

Draw = Callable[[Ragged, CounterRNG], ExampleTable]
"""Draws an example of each text."""


class DynamicLoader(EpochLoader):
    """Texts in shuffled epochs, padded or packed; an example of each is drawn in every epoch."""

    def __init__(
        self, texts: Sequence[Ids], draw: Draw, spec: Padded | Packed, seed: int, pad: int, source_pad: int = 0
    ):
        self.texts, self.draw = Ragged.of(texts), draw
        _, first, inverse = np.unique(self.texts.sizes, return_index=True, return_inverse=True)
        sizes = draw(self.texts.take(first), CounterRNG(first)).sizes[inverse]  # one text of each length is enough
        super().__init__(sizes, spec, seed, pad, source_pad)

    def examples(self, numbers: np.ndarray, epoch: int) -> ExampleTable:
        return self.draw(self.texts.take(numbers), CounterRNG(numbers, self.seed, epoch))


class DynamicCropLoader(CropLoader):
    """Random crops of one long text, with an example drawn from each; `spec.length` is the length of a crop."""

    def __init__(self, ids: Stream, draw: Draw, spec: Crops, seed: int, pad: int, source_pad: int = 0):
        super().__init__(ids, spec, seed)
        self.draw, self.pad, self.source_pad = draw, pad, source_pad

    def read(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        generator = Generator(PCG64([self.seed, cursor.epoch, cursor.batch]))
        rows, length = self.spec.rows, self.spec.length
        starts = generator.integers(0, len(self.ids) - length + 1, size=rows)
        texts = Ragged(self.ids.cut(starts, length).ravel(), np.full(rows, length))
        table = self.draw(texts, CounterRNG(np.arange(rows), self.seed, cursor.epoch, cursor.batch))
        batch = collate_rows([(start,) for start in starts.tolist()], table, self.pad, self.source_pad)
        return batch, Cursor(0, cursor.batch + 1)


def draw_fixed(texts: Sequence[Ids], draw: Draw, first: int = 0) -> ExampleTable:
    """Return the examples of texts that every evaluation uses; the number of the first text is `first`."""
    return draw(Ragged.of(texts), CounterRNG(np.arange(first, first + len(texts))))
