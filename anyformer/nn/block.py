"""Block: sublayers around the residual stream, and the placement of their norms.

         pre                post              branch            sandwich
     x ──┬───┐          x ──┬───┐         x ──┬───┐         x ──┬───┐
         N   │              F   │             F   │             N₁  │
         F   │              │   │             N   │             F   │
         └──(+)             └──(+)            └──(+)            N₂  │
             │                  N                 │             └──(+)

Sequential sublayers do this one after the other; parallel ones read the same x, and one sum adds all their outputs.
Without a residual connection the line on the right is missing, and the sum has the branches alone.
"""

import torch
from torch import Tensor, nn

from anyformer.config import Block, Norm
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.context import Context
from anyformer.nn.norm import normed


class Sublayer(nn.Module):
    """N_sum(x + dropout(N_branch(F(N_in x)))); an absent norm is the identity."""

    def __init__(
        self,
        inner: nn.Module,
        norm_in: nn.Module,
        norm_branch: nn.Module,
        norm_sum: nn.Module,
        dropout: float,
        residual: bool,
    ):
        super().__init__()
        self.norm_in, self.inner, self.norm_branch, self.norm_sum = norm_in, inner, norm_branch, norm_sum
        self.dropout, self.residual = nn.Dropout(dropout), residual

    def branch(self, x: Tensor, ctx: Context) -> Tensor:
        """Return what the sublayer adds to the residual stream."""
        y = self.inner(ctx.tap("in", normed(self.norm_in, x, ctx.layout, ctx.aux)), ctx)
        return ctx.tap("out", self.dropout(normed(self.norm_branch, y, ctx.layout, ctx.aux)))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        y = self.branch(x, ctx)  # [b, t, d], as x
        return normed(self.norm_sum, x + y if self.residual else y, ctx.layout, ctx.aux)


class SequentialBlock(nn.ModuleDict):
    """Sublayers applied one after the other."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        for name, sublayer in self.items():
            x = sublayer(x, ctx if ctx.taps is None else ctx.scoped(name))  # [b, t, d]
        return x


class ParallelBlock(nn.Module):
    """N_sum(x + Σ F_i(N x)): every sublayer reads the same x, through its own norm or a shared one."""

    def __init__(self, sublayers: dict[str, Sublayer], norm_in: nn.Module, norm_sum: nn.Module, residual: bool):
        super().__init__()
        self.residual = residual
        self.names = tuple(sublayers)
        for name, sublayer in sublayers.items():
            self.add_module(name, sublayer)
        self.norm_in, self.norm_sum = norm_in, norm_sum

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        h = normed(self.norm_in, x, ctx.layout, ctx.aux)  # [b, t, d]
        total = x if self.residual else torch.zeros_like(x)
        for name in self.names:
            sublayer: Sublayer = getattr(self, name)
            total = total + sublayer.branch(h, ctx.scoped(name))
        return normed(self.norm_sum, total, ctx.layout, ctx.aux)


def build_block(spec: Block, width: int) -> SequentialBlock | ParallelBlock:
    """Return the module of a block."""
    parts: dict[str, nn.Module | None] = {
        "mixer": spec.mixer.build(width),
        "cross": CrossAttention(spec.cross, width) if spec.cross else None,
        "feedforward": spec.feedforward.build(width),
    }
    inners = {name: inner for name, inner in parts.items() if inner is not None}

    def norm(*placements: str, unless: bool = False) -> nn.Module:
        return (spec.norm if spec.placement in placements and not unless else Norm.none()).build(width)

    parallel, shared = spec.is_parallel, spec.shares_norm
    sublayers = {
        name: Sublayer(
            inner,
            norm_in=norm("pre", "sandwich", unless=shared),
            norm_branch=norm("branch", "sandwich"),
            norm_sum=norm("post", unless=parallel),
            dropout=spec.dropout,
            residual=spec.residual,
        )
        for name, inner in inners.items()
    }
    if not parallel:
        return SequentialBlock(sublayers)
    norm_in, norm_sum = norm("pre", "sandwich", unless=not shared), norm("post")
    return ParallelBlock(sublayers, norm_in, norm_sum, spec.residual)
