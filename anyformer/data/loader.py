"""Loaders: the batch of a training step is a function of the seed and the step; and batches for evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.random import PCG64, Generator

from anyformer.data.batch import Batch, Example, ExampleTable, Ids, Ragged, collate, collate_rows, with_empty_rows
from anyformer.data.batch_plan import GradualPlan, Plan, PlanSteps, Row, plan_packed, plan_padded, round_lengths
from anyformer.data.counter_rng import CounterRNG
from anyformer.kernels.conventions import IGNORE, PADDING, next_power_of_two
from anyformer.recipe import Packed, Padded, TextBatches

if TYPE_CHECKING:
    from anyformer.data.media import MediaStore
    from anyformer.data.shards import Stream


class Cursor(NamedTuple):
    """The next batch to read: an epoch, and the number of a batch within it."""

    epoch: int = 0
    batch: int = 0


class Loader(Protocol):
    """Reads the batch at a cursor, and returns it with the cursor of the next one."""

    @property
    def shapes(self) -> int:
        """How many different shapes the batches of the first epoch have."""

    def read(self, cursor: Cursor) -> tuple[Batch, Cursor]: ...


class EpochLoader(ABC):
    """Shuffled epochs of examples with known sizes, padded or packed."""

    media: "MediaStore | None" = None  # reads the images and sounds of batches
    row_labels = False  # labels are of whole rows, and not of their tokens

    def __init__(self, sizes: np.ndarray, spec: Padded | Packed, seed: int, pad: int, source_pad: int):
        """`sizes` [n, 2] are the tokens of each side of an example: see `ExampleTable.sizes`."""
        self.sizes, self.spec, self.seed, self.pad, self.source_pad = sizes, spec, seed, pad, source_pad
        self._plans: dict[int, GradualPlan] = {}  # of the current epoch and of the next

    @abstractmethod
    def examples(self, numbers: np.ndarray, epoch: int) -> ExampleTable:
        """Return the examples with these numbers, as they are in an epoch."""

    def plan(self, epoch: int) -> Plan:
        """Return the rows of all batches of an epoch."""
        return self._gradual_plan(epoch).plan()

    @property
    def shapes(self) -> int:
        if isinstance(self.spec, Packed):
            return 1
        sizes = [self.sizes[[i for row in rows for i in row]].max(axis=0) for rows in self.plan(0)]
        if self.spec.few_shapes:
            return len(np.unique(self._rounded(np.array(sizes).max(axis=1))))
        return len({(len(rows), *size.tolist()) for rows, size in zip(self.plan(0), sizes, strict=True)})

    def _gradual_plan(self, epoch: int) -> GradualPlan:
        if epoch not in self._plans:
            self._plans = {e: plan for e, plan in self._plans.items() if e == epoch - 1}
            self._plans[epoch] = GradualPlan(self._plan_steps(epoch))
        return self._plans[epoch]

    def _plan_steps(self, epoch: int) -> PlanSteps:
        return self._plan_examples(self.sizes, epoch)

    def _plan_examples(self, sizes: np.ndarray, epoch: int) -> PlanSteps:
        if isinstance(self.spec, Packed):
            return plan_packed(sizes, self.spec.tokens, self.spec.length, self.seed, epoch)
        if self.spec.few_shapes:
            sizes = self._rounded(sizes)
        return plan_padded(sizes, self.spec.tokens, self.spec.pool, self.seed, epoch)

    def _rounded(self, sizes: np.ndarray) -> np.ndarray:
        """Round the sizes of examples up to few values, none above the longest example."""
        return round_lengths(sizes, int(self.sizes.max()))

    def read(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        plan = self.plan(cursor.epoch)
        rows, width, documents = plan[cursor.batch], None, 0
        if isinstance(self.spec, Packed):  # every batch has one shape, also the last: compiled code depends on it
            rows = rows + [()] * (self.spec.tokens // self.spec.length - len(rows))
            width, documents = self.spec.length, self.documents
        numbers = np.array([i for row in rows for i in row])
        if self.spec.rounds_lengths:
            width = int(self._rounded(self.sizes[numbers]).max())
        batch = collate_rows(
            rows, self.examples(numbers, cursor.epoch), self.pad, self.source_pad, width, documents, self.row_labels
        )
        if isinstance(self.spec, Padded) and width is not None:
            batch = with_empty_rows(batch, self.spec.tokens // width)
        if self.media is not None:
            batch = self.media.attach(batch, (self.seed, cursor.epoch, cursor.batch))
        # The plan of the next epoch is made a little per batch: all at once, it would keep a GPU waiting.
        following = cursor.batch + 1
        self._gradual_plan(cursor.epoch + 1).advance(following / len(plan))
        return batch, Cursor(cursor.epoch + 1, 0) if following == len(plan) else Cursor(cursor.epoch, following)

    @cached_property
    def documents(self) -> int:
        """Number of documents that a packed batch hardly ever exceeds, and so the same for nearly all batches."""
        first = self._plans.get(0) or GradualPlan(self._plan_steps(0))
        return next_power_of_two(int(1.1 * max(sum(map(len, rows)) for rows in first.plan())))


class ExampleLoader(EpochLoader):
    """Fixed examples in shuffled epochs.

    With `weights`, an example is read that many times per epoch; the fractional part is a probability.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        spec: Padded | Packed,
        seed: int,
        pad: int,
        source_pad: int,
        weights: Sequence[float] | None = None,
        media: "MediaStore | None" = None,
        row_labels: bool = False,
    ):
        self.media, self.row_labels = media, row_labels
        self.weights = None if weights is None else np.asarray(weights)
        self.table = ExampleTable.of(examples)
        # A pair that is read separately takes two rows of a padded batch.
        in_batch = 2 if "pair" in self.table.columns and isinstance(spec, Padded) else 1
        super().__init__(self.table.sizes * in_batch, spec, seed, pad, source_pad)

    def examples(self, numbers: np.ndarray, epoch: int) -> ExampleTable:
        return self.table.take(numbers)

    def _plan_steps(self, epoch: int) -> PlanSteps:
        if self.weights is None:
            return (yield from super()._plan_steps(epoch))
        uniform = np.random.Generator(np.random.PCG64([self.seed, epoch, 2])).random(len(self.weights))
        chosen = np.repeat(np.arange(len(self.weights)), np.floor(self.weights + uniform).astype(np.int64))
        if not len(chosen):  # all weights are small, and none was drawn
            chosen = np.array([self.weights.argmax()])
        plan = yield from self._plan_examples(self.sizes[chosen], epoch)
        return [[tuple(chosen[list(row)].tolist()) for row in rows] for rows in plan]


class CropLoader:
    """Random crops of one long text; each batch has its own random generator."""

    shapes = 1

    def __init__(self, ids: "Stream", spec: TextBatches, seed: int):
        self.ids, self.spec, self.seed = ids, spec, seed

    def read(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        generator = np.random.Generator(np.random.PCG64([self.seed, cursor.epoch, cursor.batch]))
        starts = generator.integers(0, len(self.ids) - self.spec.length, size=self.spec.rows)
        crops = torch.from_numpy(self.ids.cut(starts, self.spec.length + 1))
        return Batch(crops[:, :-1], crops[:, 1:], None, examples=tuple(starts.tolist())), Cursor(0, cursor.batch + 1)


class OrderedLoader:
    """Equal parts of one long text in parallel rows, from beginning to end; an incomplete last batch is dropped."""

    shapes = 1

    def __init__(self, ids: "Stream", spec: TextBatches):
        self.spec, self.part = spec, (len(ids) - 1) // spec.rows
        self.starts = np.arange(spec.rows) * self.part
        self.ids, self.count = ids, self.part // spec.length

    def read(self, cursor: Cursor) -> tuple[Batch, Cursor]:
        starts = self.starts + cursor.batch * self.spec.length
        crops = torch.from_numpy(self.ids.cut(starts, self.spec.length + 1))
        examples, follows = tuple(starts.tolist()), cursor.batch > 0
        batch = Batch(crops[:, :-1], crops[:, 1:], None, examples=examples, follows_previous=follows)
        is_last = cursor.batch + 1 == self.count
        return batch, Cursor(cursor.epoch + 1, 0) if is_last else Cursor(cursor.epoch, cursor.batch + 1)


# -- batches for evaluation: every token or example once --------------------------------------------------------------


def parallel_parts(ids: "Stream", rows: int, length: int) -> Iterator[Batch]:
    """Yield a text in parallel rows, `length` tokens at a time; every token but the first is a label once."""
    labels_total = len(ids) - 1
    part = -(-labels_total // rows)
    for begin in range(0, part, length):
        width = min(length, part - begin)
        starts = np.arange(rows) * part + begin
        first = np.minimum(starts, labels_total - width)  # the last parts may end early: their rest is padding
        crops = torch.from_numpy(ids.cut(first, width + 1))
        at = torch.from_numpy(starts)[:, None] + torch.arange(width)
        is_token = at < labels_total
        at = at.clamp(max=labels_total - 1) - torch.from_numpy(first)[:, None]
        labels = torch.where(is_token, crops.gather(1, at + 1), IGNORE)
        segments = None if rows * part == labels_total else torch.where(is_token, 0, PADDING)
        yield Batch(crops.gather(1, at), labels, segments, follows_previous=begin > 0)


def windows(ids: "Stream", length: int, rows: int) -> Iterator[Batch]:
    """Yield a text in windows of `length` tokens, and a shorter last one; every token but the first is a label once."""
    whole, rest = divmod(len(ids) - 1, length)
    for first in range(0, whole, rows):
        crops = torch.from_numpy(ids.cut(np.arange(first, min(first + rows, whole)) * length, length + 1))
        yield Batch(crops[:, :-1], crops[:, 1:], None)
    if rest:
        crops = torch.from_numpy(ids.cut(np.array([whole * length]), rest + 1))
        yield Batch(crops[:, :-1], crops[:, 1:], None)


def longest_first(
    examples: Sequence[Example], tokens: int, pad: int, source_pad: int, media: "MediaStore | None" = None
) -> Iterator[Batch]:
    """Yield batches of all examples, at most `tokens` slots each; longest first: out of memory shows at once."""
    table = ExampleTable.of(examples)
    lengths = table.sizes.max(axis=1).tolist()
    batches, rows = [], list[Row]()
    for i in sorted(range(len(table)), key=lambda i: -lengths[i]):
        if rows and (len(rows) + 1) * lengths[rows[0][0]] > tokens:
            batches.append(rows)
            rows = []
        rows.append((i,))
    made = (collate(b, table, pad, source_pad) for b in [*batches, rows] if b)
    return made if media is None else map(media.attach, made)


# -- examples that are drawn from texts, new ones in every epoch (dynamic masking, Liu et al. 2019) -------------------
#
# An example depends on the seed, the epoch and the number of its text alone; its length depends on the length of the
# text alone. So plans remain functions of lengths, and resuming needs no replay. All examples of a batch are drawn at
# once, by a counter-based random generator (`data/counter_rng.py`).

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

    def __init__(self, ids: "Stream", draw: Draw, spec: TextBatches, seed: int, pad: int, source_pad: int = 0):
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
