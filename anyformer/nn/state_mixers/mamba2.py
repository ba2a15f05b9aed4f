"""Mamba-2 (Dao & Gu 2024): a state-space layer whose decay is one number per head and token (SSD)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import Mamba2
from anyformer.kernels.linear_recurrence import Recurrence
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, OutBranch, split_heads
from anyformer.nn.state_mixers.decay_init import reset_decay
from anyformer.nn.state_mixers.short_convolution import ShortConvolution
from anyformer.nn.state_mixers.state_rows import StateRows

DECAY_RATES = (1.0, 16.0)  # A at initialisation is uniform between them


class Mamba2Mixer(OutBranch):
    """out(norm(o · silu(z))), o_t = S_tᵀ C_t + D x_t, with S_t = exp(-A Δ_t) S_{t-1} + B_t (Δ_t x_t)ᵀ in each head."""

    def __init__(self, spec: Mamba2, width: int):
        super().__init__()
        h, g, p = spec.heads, spec.groups, spec.inner_width(width) // spec.heads
        self.heads, self.groups = h, g
        self.widths = (h * p, g * spec.state, g * spec.state)  # of x, B and C
        self.inputs = Linear(width, (h * p, *self.widths, h), bias=False)  # z; x, B and C; Δ
        self.conv = ShortConvolution(sum(self.widths), spec.convolution, bias=True)
        self.log_a, self.dt_bias = nn.Parameter(torch.empty(h)), nn.Parameter(torch.empty(h))
        self.skip = nn.Parameter(torch.empty(h))  # D
        self.norm = spec.norm.build(h * p)
        self.out = Linear(h * p, width, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        rows = StateRows(x, ctx)
        z, mixed, step = self.inputs(x).split((self.widths[0], sum(self.widths), self.heads), dim=-1)
        v, k, q = rows.convolve(rows.align(mixed), self.conv).split(self.widths, dim=-1)
        v, k, q = split_heads(v, self.heads), split_heads(k, self.groups), split_heads(q, self.groups)
        step = F.softplus(at_least_fp32(step) + self.dt_bias)  # Δ [b, t, h]
        log_decay = rows.align(ctx.tap("log_decay", -at_least_fp32(self.log_a).exp() * step)).transpose(1, 2)
        steps = rows.align(step).transpose(1, 2)[..., None]
        out = rows.run(Recurrence(q, k, v * steps.to(v.dtype), log_decay))
        out = ctx.tap("heads", torch.addcmul(out, rows.restore(v), self.skip[:, None, None].to(out.dtype)))
        return self.out(self.norm(out.transpose(1, 2).flatten(2) * F.silu(z)))  # [b, h, t, p] -> [b, t, h·p]

    def reset(self) -> None:
        """Draw A and the bias of Δ as in the paper; D is 1."""
        reset_decay(self.log_a, self.dt_bias, DECAY_RATES)
        self.skip.fill_(1)
