"""Learned weights for pairs of positions in place of self-attention; they depend on positions, not on tokens.

The number of positions is fixed; the stack refuses longer inputs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.layout import real, sees
from anyformer.config import FullyConnected, Pattern, PositionMixing, plain_pattern
from anyformer.nn.context import Context


class PositionMixer(nn.Module):
    """y_q = Σ_k w[p_q, p_k] x_k + b[p_q] over the tokens k that q sees (Tolstikhin et al. 2021)."""

    def __init__(self, spec: PositionMixing):
        super().__init__()
        self.pattern = _pattern(spec)
        self.weight = nn.Parameter(torch.empty(spec.length, spec.length))
        self.bias = nn.Parameter(torch.empty(spec.length)) if spec.bias else None

    def residual_weights(self) -> Iterator[Tensor]:
        yield self.weight

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, read = ctx.layout, ctx.keys, ctx.with_history(x)
        weights = self.weight[q.positions[:, :, None], k.positions[:, None, :]] * sees(self.pattern, q, k)
        y = weights @ read  # [b or 1, t, s] @ [b, s, d]
        return y if self.bias is None else y + self.bias[q.positions][..., None]


class DenseMixer(nn.Module):
    """y_q = Σ_k W[p_q, p_k] x_k + b[p_q] over the tokens k that q sees, each W[p, r] a d×d block of one matrix.

    Rows whose positions count from 0 are one matmul with the sub-matrix of their length. Any other layout looks its
    blocks up token by token, which stores b·t·s·d² values: for decoding and small batches.
    """

    def __init__(self, spec: FullyConnected, width: int):
        super().__init__()
        size = spec.length * width
        self.length, self.width, self.pattern = spec.length, width, _pattern(spec)
        self.weight = nn.Parameter(torch.empty(size, size))
        self.bias = nn.Parameter(torch.empty(size)) if spec.bias else None

    def residual_weights(self) -> Iterator[Tensor]:
        yield self.weight

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, t = ctx.layout, ctx.keys, x.shape[1]
        blocks = self.weight.view(self.length, self.width, self.length, self.width)
        plain = ctx.reads_own_tokens and q.is_arange and q.marks is None
        read = ctx.with_history(x) if not plain or ctx.cache is not None else x
        if plain:
            if q.padding != "none" and q.segments is not None:
                x = x * real(q.segments)[..., None]
            blocks = blocks[:t, :, :t]
            if not self.pattern.looks_ahead:
                blocks = blocks * self.pattern.sees(q.positions[0, :, None, None, None], q.positions[0, :, None])
            y = F.linear(x.flatten(1), blocks.reshape(t * self.width, t * self.width)).unflatten(1, (t, -1))
        else:
            seen = read[:, None] * sees(self.pattern, q, k)[..., None]  # [b, t, s, d]
            pairs = blocks.transpose(1, 2)[q.positions[:, :, None], k.positions[:, None, :]]  # [b, t, s, d, d]
            y = torch.einsum("btsij,btsj->bti", pairs.expand(x.shape[0], -1, -1, -1, -1), seen)
        return y if self.bias is None else y + self.bias.view(self.length, self.width)[q.positions]


def _pattern(spec: FullyConnected | PositionMixing) -> Pattern:
    assert spec.causal is not None, "the stack decides"
    return plain_pattern(not spec.causal)
