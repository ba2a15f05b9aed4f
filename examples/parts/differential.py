"""Differential attention (Ye et al. 2024): the difference of two softmaxes, so that common noise cancels.

    out = norm((softmax(q₁k₁ᵀ · scale) - λ softmax(q₂k₂ᵀ · scale)) v) · (1 - λ₀)
    λ = exp(a₁·b₁) - exp(a₂·b₂) + λ₀ with learned vectors a, b of all heads

q₁ and q₂ are the even and the odd elements of a head, so that rotary positions rotate pairs within each of them. In
the paper λ₀ = 0.8 - 0.6 exp(-0.3 l) in layer l, from 0: give each block its own.
"""

from typing import Literal

import torch
from torch import nn

from anyformer.config import Attention, Cost, Fault, Fraction, RMSNorm, TokenNorm, factor, pairs
from anyformer.nn.api import MultiHeadAttention


class Differential(Attention):
    """(softmax(q₁k₁ᵀ) - λ softmax(q₂k₂ᵀ)) v, normed in each head; q₁ and q₂ are halves of it (Ye et al. 2024)."""

    kind: Literal["differential"] = "differential"
    start: Fraction = 0.8  # λ₀, the weight of the second softmax at the start
    head_norm: TokenNorm = RMSNorm()  # norm of each head's output

    def build(self, width):
        return DifferentialAttention(self, width)

    def cost_between(self, pattern, d, b, t, s, side, across=False):
        k, k_v = self.widths(d)
        second = Cost(4 * (k // 2), flops=2 * b * self.heads * pairs(pattern, t, s) * (k + k_v))
        second += Cost(saved=b * t * self.heads * (2 * k + 2 * k_v)) + self.head_norm.cost(k_v, b * t * self.heads)
        return super().cost_between(pattern, d, b, t, s, side, across) + second

    def faults(self, width, side, has_encoder):
        yield from super().faults(width, side, has_encoder)
        if self.divides(width) and self.widths(width)[0] % 4:
            yield Fault("key_width", f"= {self.widths(width)[0]}: must be a multiple of 4, for two halves of pairs")


class DifferentialAttention(MultiHeadAttention):
    def __init__(self, spec, width):
        super().__init__(spec, width)
        k, k_v = spec.widths(width)
        self.start, self.scale = spec.start, factor(spec.scale, width, k // 2)
        self.vectors, self.head_norm = nn.Parameter(torch.empty(2, 2, k // 2)), spec.head_norm.build(k_v)

    def attend(self, q, k, v, lowered, scoring):
        return self.difference(super().attend, q, k, v, lowered, scoring)

    def weigh(self, q, k, lowered, scoring):
        return self.difference(super().weigh, q, k, lowered, scoring)

    def difference(self, function, q, *args):
        even = torch.arange(q.shape[-1], device=q.device) % 2 == 0
        first, second = function(q * even, *args), function(q * ~even, *args)
        sums = self.vectors.prod(0).sum(-1).exp()
        return first - (sums[0] - sums[1] + self.start).to(second.dtype) * second

    def read(self, q, k, v, ctx):
        return self.head_norm(super().read(q, k, v, ctx)) * (1 - self.start)

    def reset(self):
        super().reset()
        self.vectors.normal_(std=0.1)
