"""What every task shares: the loss as sum and count, and the call of a model on a batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from anyformer.attention.layout import Layout, make_layout
from anyformer.cache.segment_memory import Past
from anyformer.config import ConfigError, Fault, ModelConfig, Side
from anyformer.conventions import PLAIN, SEEN
from anyformer.data.batch import Batch, Example
from anyformer.data.loader import Loader
from anyformer.data.readers import SHOWN, Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.cross_entropy import token_loss as token_loss
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask, Batches


@dataclass(frozen=True)
class Metrics:
    """What an evaluation found. `loss` per token or label, or `train.best`, decides which checkpoint is best."""

    task: str
    count: int  # examples, or tokens for a language model
    values: dict[str, float]
    notes: dict[str, Any]  # signatures, intervals, and rows that were left out


SLOTS = 8192  # places for tokens in a batch that is read without learning

Progress = Callable[[int], None]
"""Told how many more texts are answered."""


class Task(Protocol):
    """A task with its tokenizers."""

    tokenizer: TextTokenizer
    source_tokenizer: TextTokenizer | None

    @property
    def spec(self) -> AnyTask:
        """With what the task learnt of its training rows, such as the names of labels."""

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Summed over the labels that ask for something, in fp32."""

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        """The rows that the task allows, the model can read and, where it is trained by them, batches can hold.

        The others are bad rows.
        """

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        """Batches of fitting rows."""

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """How well a model does on fitting rows."""

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """An answer to each text; options are those of `generation.generate`."""


def side_of(config: ModelConfig) -> Side:
    """Which stack reads the texts of a model with one."""
    return "decoder" if config.decoder else "encoder"


def too_long(length: int, config: ModelConfig, side: Side) -> str:
    """Why a stack cannot read so many tokens; empty if it can."""
    ends = config.stacks[side].ends
    if not ends or length <= ends[0][0]:
        return ""
    limit, positions = ends[0]
    return f"has {length} tokens, and the {side} has {limit} {positions}"


def refuse_long(lengths: Sequence[int], config: ModelConfig, side: Side) -> None:
    """Names the texts that a stack cannot read."""
    found = [Fault(f"text {i}", why) for i, n in enumerate(lengths, 1) if (why := too_long(n, config, side))]
    if len(found) > SHOWN:
        found[SHOWN:] = [Fault("", f"... and {len(found) - SHOWN} more")]
    if found:
        raise ConfigError(found)


def left_out(rows: Rows) -> dict[str, Any]:
    """A note of the rows that an evaluation did not see."""
    return {"left_out": {"rows": len(rows.bad), "first": [str(bad) for bad in rows.bad[:SHOWN]]}} if rows.bad else {}


def inputs_of(batch: Batch, packed: bool) -> tuple[Inputs, ...]:
    """Return a model's arguments for a batch whose rows are padded on the right, or packed: `model(*inputs)`."""
    own = _layout(batch, batch.segments, packed)
    if batch.source is None:
        return (Inputs(batch.ids, own, batch.types, batch.spelled),)
    return Inputs(batch.source, _layout(batch, batch.source_segments, packed)), Inputs(batch.ids, own)


def call(model: Transformer, batch: Batch, packed: bool) -> Tensor:
    """Logits for a batch."""
    logits: Tensor = model(*inputs_of(batch, packed))
    return logits


def past_of(model: Transformer, batch: Batch, before: Past | None) -> Past | None:
    """What a batch goes on from: the past of the batch before, or an empty one; None for a model without memory."""
    if model.decoder is None or not model.decoder.segment_memory:
        return None
    return before if before is not None and batch.follows else model.new_past(len(batch.ids))


def _layout(batch: Batch, segments: Tensor | None, packed: bool) -> Layout | None:
    """The facts that spare a mask: pads are on the right, so positions count as in a full row."""
    if segments is None:
        rows, length = batch.ids.shape
        return None if batch.marks is None else make_layout(rows, length, batch.ids.device, marks=batch.marks)
    if packed:
        return Layout.packed_rows(segments, documents=batch.documents)._replace(marks=batch.marks)
    return Layout.right_padded(segments)._replace(marks=batch.marks)


def prefixed(piece: Example, length: int) -> Example:
    """A piece whose first tokens are seen by all of it."""
    return piece._replace(marks=[SEEN] * length + [PLAIN] * (len(piece.ids) - length))


@torch.no_grad()
def total_loss(model: Transformer, batches: Iterable[Batch], device: torch.device) -> tuple[float, int]:
    """The summed loss of a model in eval mode, and over how many tokens."""
    total, count = 0.0, 0
    past: Past | None = None
    for batch in batches:
        here = batch.to(device)
        before, inputs = past_of(model, here, past), inputs_of(here, packed=False)
        if before is None:
            logits = model(*inputs)
        else:
            logits, past = model(*inputs, past=before)
        total += float(token_loss(logits, here.labels))
        count += batch.asked
    return total, count
