"""Normalised Transformer (nGPT, Loshchilov et al. 2024): all vectors have length 1, and layers move them on a sphere.

    h ← norm(h + α ⊙ (norm(F(h)) - h)),   norm(x) = x / |x|,   with a learned α for each channel

F is attention or a feed-forward network. A block has norm = "unit" and placement = "post"; its attention has
qk_norm = "unit" and scale = {kind = "value", value = sqrt(k)}. In the paper the rows of all matrices are brought back
to length 1 after each step, too, for which a part has no hook, and queries, keys and logits have learned factors.
"""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from anyformer.config import Attention, Cost, FeedForward, Fraction, Gated, TokenNorm
from anyformer.nn.api import MultiHeadAttention


class Unit(TokenNorm):
    """x / |x|, without weights (Loshchilov et al. 2024)."""

    kind: Literal["unit"] = "unit"

    def build(self, width):
        return UnitNorm()

    def cost(self, width, rows):
        return Cost(saved=rows * width)


class SphereAttention(Attention):
    """α ⊙ (norm(attention(x)) - x), the step from x towards the output of attention (Loshchilov et al. 2024)."""

    kind: Literal["sphere_attention"] = "sphere_attention"
    rate: Fraction = 0.05  # α at the start

    def build(self, width):
        return SphereAttentionModule(self, width)

    def cost(self, width, b, t, side):
        return super().cost(width, b, t, side) + Cost(width, saved=2 * b * t * width)


class SphereFeedForward(FeedForward):
    """α ⊙ (norm(F(x)) - x), the step from x towards the output of another feed-forward (Loshchilov et al. 2024)."""

    kind: Literal["sphere_feedforward"] = "sphere_feedforward"
    inner: FeedForward = Gated()  # F
    rate: Fraction = 0.05  # α at the start

    def build(self, width):
        return SphereFeedForwardModule(self, width)

    def cost(self, width, rows):
        return self.inner.cost(width, rows) + Cost(width, saved=2 * rows * width)

    def matrices(self, width):
        yield from (matrix.under("inner") for matrix in self.inner.matrices(width))


class UnitNorm(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=-1)


class Step(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.rate, self.start = nn.Parameter(torch.empty(width)), rate

    def forward(self, x, y):
        return self.rate.to(x.dtype) * (F.normalize(y, dim=-1) - x)

    def reset(self):
        self.rate.fill_(self.start)


class SphereAttentionModule(MultiHeadAttention):
    def __init__(self, spec, width):
        super().__init__(spec, width)
        self.step = Step(width, spec.rate)

    def forward(self, x, ctx):
        return self.step(x, super().forward(x, ctx))


class SphereFeedForwardModule(nn.Module):
    def __init__(self, spec, width):
        super().__init__()
        self.inner, self.step = spec.inner.build(width), Step(width, spec.rate)

    def forward(self, x, ctx):
        return self.step(x, self.inner(x, ctx))
