"""Base of tasks whose examples are drawn from texts (mlm, spans, prefix_lm): chunks of texts, loaders, metrics."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import ExampleTable, Ragged
from anyformer.data.counter_rng import CounterRNG
from anyformer.data.loader import DynamicCropLoader, DynamicLoader, Loader, draw_fixed, longest_first
from anyformer.data.readers import Rows
from anyformer.data.shards import InMemory
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, DynamicTask, ExampleBatches, TextBatches
from anyformer.tasks.base import MAX_INFERENCE_TOKENS, BuiltTask, Metrics, bad_row_notes, token_values

EVAL_LENGTH = 512  # tokens of a row in evaluation, if batches are padded
MAX_STREAM_ROWS = 1000  # rows of a stream that are in memory at once


class DynamicExampleTask(BuiltTask):
    """A task that draws its examples from texts."""

    spec: DynamicTask
    min_tokens: int  # of a text

    def encode(self, rows: Rows) -> list[list[int]]:
        """Return the ids of texts, from which examples are drawn."""
        return rows.encoded("text", self.tokenizer.encode_batch)

    @abstractmethod
    def draw(self, texts: Ragged, rng: CounterRNG) -> ExampleTable:
        """Return an example of each text. Its lengths depend on the length of the text alone, and on no other text."""

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        """Return the rows of enough tokens; a text that is too long continues in another row."""
        if rows.stream is not None:
            rows.stream.check(self.tokenizer)
            return rows
        if batches is not None:
            rows = rows.with_ids({"text": self.tokenizer.encode_batch})
        short = {i: len(ids) for i, ids in enumerate(self.encode(rows)) if len(ids) < self.min_tokens}
        what = f"and the task {self.spec.kind} needs at least {self.min_tokens}"
        return rows.without({i: f"the text has {n} token{'' if n == 1 else 's'}, {what}" for i, n in short.items()})

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        """Return a loader of padded or packed texts, or of random crops of all texts concatenated."""
        pad = self.tokenizer.pad or 0
        length = _max_text(self, _row_length(batches, model.config))
        if isinstance(batches, ExampleBatches):
            return DynamicLoader(chunks(self.encode(rows), length), self.draw, batches, seed, pad, pad)
        assert isinstance(batches, TextBatches)
        stream = rows.stream if rows.stream is not None else InMemory.of(self.encode(rows))
        if len(stream) < length:
            raise ConfigError([Fault("batches.length", f"= {batches.length}: the text has {len(stream)} tokens")])
        return DynamicCropLoader(stream, self.draw, batches.model_copy(update={"length": length}), seed, pad, pad)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure loss and accuracy of the labels: on the same examples each time, in rows as long as in training."""
        length = _row_length(batches, model.config, EVAL_LENGTH)
        pad = self.tokenizer.pad or 0
        tables = _evaluation_examples(self, rows, _max_text(self, length))
        parts = (longest_first(table, max(MAX_INFERENCE_TOKENS, length), pad, pad) for table in tables)
        values, count = token_values(model, chain.from_iterable(parts))
        return Metrics(self.spec.kind, count, values, {"window": length, **bad_row_notes(rows)})


def _evaluation_examples(task: DynamicExampleTask, rows: Rows, limit: int) -> Iterator[ExampleTable]:
    """Yield all examples of an evaluation; a stream may be larger than memory, so it is read in parts."""
    if rows.stream is None:
        yield draw_fixed(chunks(task.encode(rows), limit), task.draw)
        return
    bounds = _bounds(len(rows.stream), limit)
    for first in range(0, len(bounds) - 1, MAX_STREAM_ROWS):
        part = bounds[first : first + MAX_STREAM_ROWS + 1]
        (ids,) = rows.stream.cut(np.array(part[:1]), part[-1] - part[0]).tolist()
        yield draw_fixed([ids[a - part[0] : b - part[0]] for a, b in pairwise(part)], task.draw, first)


def chunks(texts: Sequence[list[int]], limit: int) -> list[list[int]]:
    """Return texts of at most `limit` tokens: longer ones are cut into as few equal parts as possible."""
    return [ids[a:b] for ids in texts for a, b in pairwise(_bounds(len(ids), limit))]


def _bounds(length: int, limit: int) -> list[int]:
    """Return where the equal parts of a text begin, and its end."""
    parts = max(1, -(-length // limit))
    return [length * i // parts for i in range(parts + 1)]


def _row_length(batches: Batches, config: ModelConfig, padded_length: int | None = None) -> int:
    """Return how many tokens a row holds on each side of a model; if padded, `padded_length` or all of a batch."""
    length = batches.row_length or padded_length or batches.row_limit
    limits = [stack.limit for stack in config.stacks.values() if stack.limit is not None]
    return min([length, *limits])


def _max_text(task: DynamicExampleTask, row: int) -> int:
    """Return the length of the longest text whose example fits into a row."""

    def needed(length: int) -> int:
        return int(draw_fixed([[0] * length], task.draw).sizes.max())

    if needed(task.min_tokens) > row:
        what = f"a row of {row} tokens is too short: the task needs {needed(task.min_tokens)}"
        raise ConfigError([Fault("batches", what)])
    lengths = range(task.min_tokens, 2 * row + task.min_tokens)
    return lengths[bisect_right(lengths, row, key=needed) - 1]
