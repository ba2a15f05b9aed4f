"""Attention scores, cap(q kᵀ · scale): the one definition of how queries and keys are compared."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from anyformer.kernels.runtime import at_least_fp32

Normalizer = Literal["softmax", "relu"]


class Scoring(NamedTuple):
    """How a layer turns queries and keys into attention weights."""

    scale: float
    normalizer: Normalizer = "softmax"  # relu: relu(scores) / number of visible keys
    cap: float | None = None
    sinks: Tensor | None = None  # [h]: a score for each head that takes weight and has no value
    dropout: float = 0.0  # of the weights: 0 in evaluation

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return cap(q kᵀ · scale), [b, h, t, s] in fp32 or wider, before biases and masks."""
        scores = at_least_fp32(q @ repeat_heads(k, q.shape[1]).mT) * self.scale
        return scores if self.cap is None else soft_cap(scores, self.cap)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(x / cap), whose absolute values stay below the cap (Gemma 2)."""
    return cap * torch.tanh(x / cap)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each of g key or value heads [b, g, s, k] for the h/g query heads that share it."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)
