"""What tasks share whose examples are drawn from texts: how texts are cut to what rows hold, loaders, and measures."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.conventions import IGNORE
from anyformer.data.batch import ExampleTable, Ragged
from anyformer.data.counter_rng import CounterRNG
from anyformer.data.dynamic_loader import DrawnCrops, DynamicLoader, drawn
from anyformer.data.loader import Loader, in_order
from anyformer.data.readers import Rows
from anyformer.data.shards import InMemory
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Crops, DynamicTask, Ordered, Padded
from anyformer.tasks.base import SLOTS, Metrics, call, left_out, token_loss

WINDOW = 512  # tokens of a row in evaluation, where batches say nothing of it
TOGETHER = 1000  # rows of a stream that are held at once


class DrawnTask(ABC):
    """A task that makes examples of texts."""

    spec: DynamicTask
    tokenizer: TextTokenizer
    least: int  # tokens that a text must have

    def encode(self, rows: Rows, keep: bool = False) -> list[list[int]]:
        """The ids of texts, nothing drawn yet."""
        return rows.encoded("text", self.tokenizer.encode_batch, keep)

    @abstractmethod
    def draw(self, texts: Ragged, chance: CounterRNG) -> ExampleTable:
        """An example of each text; its lengths depend on that of the text alone, and what it is on no other text."""

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        """The rows of enough tokens; a text that is too long goes on in another row."""
        if rows.stream is not None:
            rows.stream.check(self.tokenizer)
            return rows
        texts = self.encode(rows, keep=batches is not None)
        found = {i: len(ids) for i, ids in enumerate(texts) if len(ids) < self.least}
        what = f"and the task {self.spec.kind} needs {self.least} at least"
        return rows.without({i: f"the text has {n} token{'' if n == 1 else 's'}, {what}" for i, n in found.items()})

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        """Texts as they are drawn, padded or packed; or random crops of all of them, one after the other."""
        assert not isinstance(batches, Ordered)
        pad = self.tokenizer.pad or 0
        room = _room(self, _row(batches, model.config))
        if not isinstance(batches, Crops):
            return DynamicLoader(windows(self.encode(rows), room), self.draw, batches, seed, pad, pad)
        stream = rows.stream if rows.stream is not None else InMemory.of(self.encode(rows))
        if len(stream) < room:
            raise ConfigError([Fault("batches.length", f"= {batches.length}: the text has {len(stream)} tokens")])
        return DrawnCrops(stream, self.draw, batches.model_copy(update={"length": room}), seed, pad, pad)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Loss and accuracy where something is asked: of the same draws each time, in windows as long as training's."""
        length = _row(batches, model.config, WINDOW)
        pad, device = self.tokenizer.pad or 0, next(model.parameters()).device
        parts = (in_order(pieces, max(SLOTS, length), pad, pad) for pieces in _asked(self, rows, _room(self, length)))
        total, right, count = 0.0, 0, 0
        with torch.no_grad():
            for batch in chain.from_iterable(parts):
                here = batch.to(device)
                logits = call(model, here, packed=False)
                total += float(token_loss(logits, here.labels))
                right += int(((logits.argmax(dim=-1) == here.labels) & (here.labels != IGNORE)).sum())
                count += batch.asked
        loss = total / count
        values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": right / count}
        notes: dict[str, Any] = {"window": length, **left_out(rows)}
        return Metrics(self.spec.kind, count, values, notes)


def _asked(task: DrawnTask, rows: Rows, most: int) -> Iterator[ExampleTable]:
    """All examples of an evaluation; those of a stream, which may be longer than memory, some at a time."""
    if rows.stream is None:
        yield drawn(windows(task.encode(rows), most), task.draw)
        return
    cuts = _cuts(len(rows.stream), most)
    for first in range(0, len(cuts) - 1, TOGETHER):
        here = cuts[first : first + TOGETHER + 1]
        (ids,) = rows.stream.cut(np.array(here[:1]), here[-1] - here[0]).tolist()
        yield drawn([ids[a - here[0] : b - here[0]] for a, b in pairwise(here)], task.draw, first)


def windows(texts: Sequence[list[int]], most: int) -> list[list[int]]:
    """Texts of at most so many tokens: a longer one in equal parts, as few as there can be."""
    return [ids[a:b] for ids in texts for a, b in pairwise(_cuts(len(ids), most))]


def _cuts(length: int, most: int) -> list[int]:
    parts = max(1, -(-length // most))
    return [length * i // parts for i in range(parts + 1)]


def _row(batches: Batches, config: ModelConfig, otherwise: int | None = None) -> int:
    """How many tokens a row holds, on each side of a model."""
    length = (otherwise or batches.tokens) if isinstance(batches, Padded) else batches.length
    limits = [stack.limit for stack in config.stacks.values() if stack.limit is not None]
    return min([length, *limits])


def _room(task: DrawnTask, row: int) -> int:
    """How long a text may be whose example fits into a row."""

    def needed(length: int) -> int:
        return int(drawn([[0] * length], task.draw).sizes.max())

    if needed(task.least) > row:
        what = f"a row of {row} tokens is too short: the task needs {needed(task.least)}"
        raise ConfigError([Fault("batches", what)])
    return _last(lambda length: needed(length) <= row, task.least, 2 * row + task.least)


def _last(fits: Callable[[int], bool], first: int, beyond: int) -> int:
    """The last number that fits, of which all do up to some place."""
    while beyond - first > 1:
        middle = (first + beyond) // 2
        first, beyond = (middle, beyond) if fits(middle) else (first, middle)
    return first
