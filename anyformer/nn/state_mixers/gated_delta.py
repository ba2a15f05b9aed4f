"""Gated DeltaNet (Yang, Kautz & Hatamizadeh 2024), as in Qwen3-Next: a decay and the delta rule in one state."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import GatedDelta
from anyformer.kernels.linear_recurrence import Recurrence
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, OutBranch, split_heads
from anyformer.nn.state_mixers.decay_init import reset_decay
from anyformer.nn.state_mixers.short_convolution import ShortConvolution
from anyformer.nn.state_mixers.state_rows import StateRows

EPS = 1e-6  # under the root of a norm of q and k
DECAY_RATES = (0.0, 16.0)  # A at initialisation is uniform between them


class GatedDeltaMixer(OutBranch):
    """out(norm(o) · silu(z)), o_t = S_tᵀ q_t / sqrt(k) for each head."""

    def __init__(self, spec: GatedDelta, width: int):
        super().__init__()
        h, g, (k, k_v) = spec.heads, spec.groups, spec.widths(width)
        self.heads, self.groups, self.scale = h, g, k**-0.5
        self.widths = (g * k, g * k, h * k_v)
        self.qkvz = Linear(width, (*self.widths, h * k_v), bias=False)
        self.rates = Linear(width, (h, h), bias=False)  # of the delta rule, and of the decay
        self.conv = ShortConvolution(sum(self.widths), spec.convolution)
        self.log_a, self.dt_bias = nn.Parameter(torch.empty(h)), nn.Parameter(torch.empty(h))
        self.norm = spec.norm.build(k_v)
        self.out = Linear(h * k_v, width, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        rows = StateRows(x, ctx)
        mixed, z = self.qkvz(x).tensor_split([sum(self.widths)], dim=-1)
        q, k, v = rows.convolve(rows.align(mixed), self.conv).split(self.widths, dim=-1)
        q, k, v = _unit_heads(q, self.groups, self.scale), _unit_heads(k, self.groups), split_heads(v, self.heads)
        rate, step = (at_least_fp32(part) for part in self.rates.split(x))  # [b, t, h]
        rate = ctx.tap("rate", rate.sigmoid())
        log_decay = ctx.tap("log_decay", -at_least_fp32(self.log_a).exp() * F.softplus(step + self.dt_bias))
        rate, log_decay = rows.align(rate).transpose(1, 2), rows.align(log_decay).transpose(1, 2)
        out = rows.run(Recurrence(q, k, v, log_decay, rate))
        out = self.norm(ctx.tap("heads", out)).transpose(1, 2).flatten(2)  # [b, h, t, v] -> [b, t, h·v]
        return self.out(out * F.silu(z))

    def reset(self) -> None:
        """Draw A and the bias of the time step as in the paper."""
        reset_decay(self.log_a, self.dt_bias, DECAY_RATES)


def _unit_heads(x: Tensor, heads: int, norm: float = 1.0) -> Tensor:
    """[b, t, h·k] -> [b, h, t, k], vectors of this norm: an RMS norm, whose kernel reads x once, over sqrt(k)."""
    x = x.unflatten(-1, (heads, -1))
    k = x.shape[-1]
    with torch.autocast(x.device.type, enabled=False):
        return (F.rms_norm(x, (k,), eps=EPS / k) * (norm * k**-0.5)).transpose(1, 2)
