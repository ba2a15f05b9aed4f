"""Convolution in place of self-attention: a token reads its neighbours, with one matrix per offset."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.layout import Layout, real, sees
from anyformer.config import Convolution, plain_pattern
from anyformer.nn.context import Context

ALL = plain_pattern(ahead=True)  # a constant: torch.compile cannot trace the construction of a spec


class ConvolutionMixer(nn.Module):
    """y_p = Σ_j W_j x_{p + offset_j} + b over the tokens of one segment, found by their positions."""

    def __init__(self, spec: Convolution, width: int):
        super().__init__()
        assert spec.causal is not None, "the stack decides"
        self.conv = nn.Conv1d(width, width, spec.width, dilation=spec.dilation, bias=spec.bias)
        span = spec.dilation * (spec.width - 1)
        self.before = spec.before(spec.causal)
        self.after = span - self.before
        self.offsets = tuple(j * spec.dilation - self.before for j in range(spec.width))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        plain = ctx.reads_own_tokens and ctx.layout.is_arange
        read = ctx.with_history(x) if not plain or ctx.cache is not None else x
        if plain:
            if ctx.layout.padding != "none" and ctx.layout.segments is not None:
                x = x * real(ctx.layout.segments)[..., None]
            return self.conv(F.pad(x.transpose(1, 2), (self.before, self.after))).transpose(1, 2)
        return self.combine(self._neighbours(read, ctx.layout, ctx.keys))

    def combine(self, near: Tensor) -> Tensor:
        """Return what `conv` makes of the neighbours [b, t, d, K] of each token, [b, t, d]."""
        return F.linear(near.flatten(2), self.conv.weight.flatten(1), self.conv.bias)

    def residual_weights(self) -> Iterator[Tensor]:
        yield self.conv.weight

    def _neighbours(self, x: Tensor, q: Layout, k: Layout) -> Tensor:
        """Return the token at each offset from each token, zero where its segment has none."""
        same = sees(ALL, q, k)
        distance = k.positions[:, None, :] - q.positions[:, :, None]  # [b, t, s]
        near = []
        for offset in self.offsets:
            is_neighbour = (same & (distance == offset)).expand(x.shape[0], -1, -1)
            index = is_neighbour.int().argmax(dim=-1)[..., None].expand(-1, -1, x.shape[2])
            near.append(x.gather(1, index) * is_neighbour.any(dim=-1, keepdim=True))
        return torch.stack(near, dim=-1)
