"""What every task shares: the loss as sum and count, and the call of a model on a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.data.batch import IGNORE, Batch
from anyformer.data.loader import Loader
from anyformer.data.sources import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.mask import Layout, count_within
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches


@dataclass(frozen=True)
class Metrics:
    """What an evaluation found. `loss` per token decides which checkpoint is best."""

    task: str
    count: int  # examples, or tokens for a language model
    values: dict[str, float]
    notes: dict[str, Any]  # signatures, intervals


class Task(Protocol):
    """A task with its tokenizers."""

    tokenizer: TextTokenizer
    source_tokenizer: TextTokenizer | None

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader: ...

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics: ...

    def predict(self, model: Transformer, texts: Sequence[str]) -> list[str]: ...


def call(model: Transformer, batch: Batch, packed: bool) -> Tensor:
    """Logits for a batch whose rows are padded on the right, or packed."""
    if batch.source is None:
        return model(batch.ids, segments=_layout(batch.ids, batch.segments, packed))
    return model(
        batch.source,
        batch.ids,
        source_segments=_layout(batch.source, batch.source_segments, packed),
        target_segments=_layout(batch.ids, batch.segments, packed),
    )


def _layout(ids: Tensor, segments: Tensor | None, packed: bool) -> Layout | None:
    """The facts that spare a mask: pads are on the right, so positions count as in a full row."""
    if segments is None:
        return None
    if packed:
        return Layout(count_within(segments), segments, ordered=True, bound=ids.shape[1])
    return Layout.right_padded(segments)


def token_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The summed cross-entropy of the labels that ask for something, in fp32."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )


@torch.no_grad()
def total_loss(model: Transformer, batches: Sequence[Batch], device: torch.device) -> tuple[float, int]:
    """The summed loss of a model in eval mode, and over how many tokens."""
    total, count = 0.0, 0
    for batch in batches:
        here = batch.to(device)
        total += float(token_loss(call(model, here, packed=False), here.labels))
        count += batch.asked
    return total, count
