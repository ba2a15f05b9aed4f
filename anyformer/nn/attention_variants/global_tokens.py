"""Attention with separate projections of global tokens (Longformer, Beltagy et al. 2020)."""

import torch
from torch import Tensor

from anyformer.attention.layout import Layout
from anyformer.config import Attention
from anyformer.kernels.conventions import SEER
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear


class GlobalTokenAttention(MultiHeadAttention):
    """Self-attention by q_i·k_j and v_j, and for a global query i by q'_i·k'_j and v'_j.

    Global are the tokens that the pattern or a mark lets see their whole segment. One kernel computes both: keys are
    [k_j; k'_j] and values [v_j; v'_j]; queries are [q_i; 0], or [0; q'_i] if i is global, which then reads the second
    half of the result. So scores, weights and masks have one definition.
    """

    def __init__(self, spec: Attention, width: int):
        super().__init__(spec, width)
        self.global_qkv = Linear(width, self.qkv.parts, bias=spec.bias)
        self.global_positions = spec.global_positions

    def global_queries(self, layout: Layout) -> Tensor | None:
        """Return which tokens are global, bool [b or 1, t]; None if none is.

        In training there is always an answer, so that every weight has a gradient, if only 0, in all processes.
        """
        if layout.marks is None and not self.global_positions and not self.training:
            return None
        found = layout.positions < self.global_positions
        return found if layout.marks is None else found | (layout.marks >= SEER)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        found = self.global_queries(ctx.layout)
        if found is None:
            return super().project(x, ctx)
        assert ctx.relation is not None
        q, k, v = super().project(x, ctx._replace(taps=None))
        own_q, own_k, own_v = self.shape_heads(self.global_qkv.split(x), ctx.relation)
        rows = found[:, None, :, None]
        q = torch.cat((q.masked_fill(rows, 0), own_q.masked_fill(~rows, 0)), dim=-1)  # [b, h, t, 2k]
        k, v = torch.cat((k, own_k), dim=-1), torch.cat((v, own_v), dim=-1)
        return ctx.tap("q", q), ctx.tap("k", k), ctx.tap("v", v)

    def read(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        out, found = super().read(q, k, v, ctx), self.global_queries(ctx.layout)
        if found is None:
            return out
        local, own = out.chunk(2, dim=-1)
        return torch.where(found[:, None, :, None], own, local)
