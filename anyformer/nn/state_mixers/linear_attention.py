"""Linear attention: plain (Katharopoulos et al. 2020) and gated (GLA, Yang et al. 2024)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ChannelDecay, LinearAttention
from anyformer.config.state_mixer import SUM_COLUMNS
from anyformer.kernels.chunked_recurrence import MIN_LOG_DECAY
from anyformer.kernels.linear_recurrence import Recurrence
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, OutBranch, split_heads
from anyformer.nn.state_mixers.short_convolution import ShortConvolution
from anyformer.nn.state_mixers.state_rows import StateRows

TINY = 1e-6  # smallest sum of weights, that of padding; features of elu + 1 are above it


class LinearAttentionMixer(OutBranch):
    """out(gate · norm(o)), o_t = S_tᵀ φ(q_t) for each head."""

    def __init__(self, spec: LinearAttention, width: int):
        super().__init__()
        h, (k, k_v) = spec.heads, spec.widths(width)
        self.heads, self.mixed = h, h * (2 * k + k_v)
        self.widths = (h * k, h * k, h * k_v)
        self.elu, self.sums, self.scale = spec.features == "elu", spec.normalizer == "sum", k**-0.5
        self.qkv = Linear(width, (*self.widths, h * k_v) if spec.gate else self.widths, bias=False)
        self.conv = ShortConvolution(self.mixed, spec.convolution) if spec.convolution else None
        self.decay_down: Linear | None = None
        if isinstance(spec.decay, ChannelDecay):
            self.decay_down = Linear(width, spec.decay.rank, bias=False)
            self.decay_up = Linear(spec.decay.rank, h * k, bias=True)
            self.temperature = spec.decay.temperature
        self.norm = spec.norm.build(k_v)
        self.out = Linear(h * k_v, width, bias=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        rows = StateRows(x, ctx)
        mixed, gate = self.qkv(x).tensor_split([self.mixed], dim=-1)
        mixed = rows.align(mixed)
        if self.conv is not None:
            mixed = rows.convolve(mixed, self.conv)
        q, k, v = (split_heads(part, self.heads) for part in mixed.split(self.widths, dim=-1))
        if self.elu:
            q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.sums:
            v = torch.cat((v, torch.ones_like(v[..., :1]), v.new_zeros(*v.shape[:3], SUM_COLUMNS - 1)), dim=-1)
        else:
            q = q * self.scale
        log_decay = None if self.decay_down is None else rows.align(self._log_decay(x, self.decay_down, ctx))
        if log_decay is not None:
            log_decay = split_heads(log_decay, self.heads)
        out = rows.run(Recurrence(q, k, v, log_decay))
        if self.sums:
            out, total = out.split((v.shape[3] - SUM_COLUMNS, SUM_COLUMNS), dim=-1)
            out = out / total[..., :1].clamp(min=TINY)
        out = self.norm(ctx.tap("heads", out)).transpose(1, 2).flatten(2)  # [b, h, t, v] -> [b, t, h·v]
        return self.out(out * F.silu(gate) if gate.shape[-1] else out)

    def _log_decay(self, x: Tensor, down: Linear, ctx: Context) -> Tensor:
        """Return log a_t [b, t, h·k]."""
        log_decay = F.logsigmoid(at_least_fp32(self.decay_up(down(x)))) / self.temperature
        return ctx.tap("log_decay", log_decay.clamp(min=MIN_LOG_DECAY))
