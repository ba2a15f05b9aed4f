"""Kimi delta attention (Kimi Linear, Moonshot 2025): the gated delta rule with a decay for each key channel.

    S_t = diag(a_t) S_{t-1} + k_t r_t (v_t - (diag(a_t) S_{t-1})ᵀ k_t)ᵀ,   o_t = S_tᵀ q_t / sqrt(k)
    a_t = exp(-A softplus(x W₁ W₂ + b)), at least exp(-5);   r_t = σ(x W_r);   out = (norm(o) · σ(x W₃ W₄)) W_o

q, k and v are short convolutions of projections of the input; q and k have norm 1. A is one number per head.
"""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from anyformer.config import Cost, GatedDelta, Matrix, Size
from anyformer.nn.api import (
    Linear,
    OutBranch,
    Recurrence,
    ShortConvolution,
    StateRows,
    at_least_fp32,
    reset_decay,
    split_heads,
)


class KimiDelta(GatedDelta):
    """The gated delta rule with a decay for each key channel (Kimi Linear 2025)."""

    kind: Literal["kimi_delta"] = "kimi_delta"
    rank: Size = 16  # width between the two matrices of the decay, and of the gate

    @property
    def part(self):
        return "Kimi delta attention"

    def build(self, width):
        return KimiDeltaMixer(self, width)

    def matrices(self, width):
        h, (k, k_v) = self.heads, self.widths(width)
        yield Matrix("qkv", width, 2 * self.groups * k + h * k_v)
        yield Matrix("down", width, 2 * self.rank + h)
        yield Matrix("decay", self.rank, h * k)
        yield Matrix("gate", self.rank, h * k_v)
        yield Matrix("out", h * k_v, width)

    def other_cost(self, width, b, t):
        h, (k, k_v), rows = self.heads, self.widths(width), b * t
        saved = rows * (2 * self.rank + h + h * k + self.stores(width).channels + 3 * h * k_v)
        return Cost(h + h * k, saved=saved) + self.norm.cost(k_v, rows * h)


class KimiDeltaMixer(OutBranch):
    def __init__(self, spec, width):
        super().__init__()
        h, g, (k, k_v) = spec.heads, spec.groups, spec.widths(width)
        self.heads, self.groups, self.widths = h, g, (g * k, g * k, h * k_v)
        self.qkv = Linear(width, self.widths, bias=False)
        self.conv = ShortConvolution(sum(self.widths), spec.convolution)
        self.down = Linear(width, (spec.rank, spec.rank, h), bias=False)  # of the decay, the gate and the rate
        self.decay, self.gate = Linear(spec.rank, h * k, bias=False), Linear(spec.rank, h * k_v, bias=False)
        self.log_a, self.dt_bias = nn.Parameter(torch.empty(h, 1)), nn.Parameter(torch.empty(h, k))
        self.norm, self.out = spec.norm.build(k_v), Linear(h * k_v, width, bias=False)

    def forward(self, x, ctx):
        rows = StateRows(x, ctx)
        q, k, v = rows.convolve(rows.align(self.qkv(x)), self.conv).split(self.widths, dim=-1)
        q, k = (F.normalize(split_heads(part, self.groups), dim=-1) for part in (q, k))
        decay, gate, rate = self.down.split(x)
        step = at_least_fp32(self.decay(decay)).unflatten(-1, self.dt_bias.shape)  # [b, t, h, k]
        step = F.softplus(step + self.dt_bias)
        log_decay = rows.align((-at_least_fp32(self.log_a).exp() * step).clamp(min=-5)).transpose(1, 2)
        rate = rows.align(at_least_fp32(rate).sigmoid()).transpose(1, 2)
        out = rows.run(Recurrence(q * k.shape[-1] ** -0.5, k, split_heads(v, self.heads), log_decay, rate))
        return self.out(self.norm(out).transpose(1, 2).flatten(2) * self.gate(gate).sigmoid())

    def reset(self):
        reset_decay(self.log_a, self.dt_bias, (1.0, 16.0))
