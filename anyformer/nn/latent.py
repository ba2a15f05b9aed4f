"""Queries, keys and values by way of a compressed vector: multi-head latent attention (DeepSeek-V2, 2024)."""

import torch
from torch import Tensor, nn

from anyformer.config import Attention, Latent
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, split_heads
from anyformer.nn.norm import build_norm


class LatentProjection(nn.Module):
    """k_i = [c W_ki ; r] and v_i = c W_vi, with c = N(x W_c) and r = rotate(x W_r) alike for all heads.

    Of a query, too, the last part turns, and with `query_rank` it goes through a vector of its own: q = N(x W_a) W_b.
    A cache keeps c and r. Since q·(c W_k) = (q W_kᵀ)·c, a few new tokens read them as they are, as the key [c ; r] and
    the value c of a single head (`Relation.absorbs`). For many new tokens, or when taps are attached, all keys and
    values are expanded.
    """

    def __init__(self, spec: Attention, compress: Latent, width: int):
        super().__init__()
        h, rank, turning = spec.heads, compress.rank, compress.rotary_width
        k, k_v = spec.widths(width)
        self.heads, self.parts = h, (k - turning, turning)
        query = compress.query_rank
        self.down = Linear(width, (query or h * k, rank, turning), bias=spec.bias)
        self.query_norm = build_norm(compress.norm, query) if query else nn.Identity()
        self.query_up = Linear(query, h * k, bias=False) if query else nn.Identity()
        self.norm = build_norm(compress.norm, rank)
        self.up = Linear(rank, (h * (k - turning), h * k_v), bias=False)

    def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, c, r = self.down.split(ctx.with_memory(x))
        q = split_heads(self.query_up(self.query_norm(q)), self.heads)
        c, r = ctx.tap("latent", self.norm(c)).unsqueeze(1), r.unsqueeze(1)  # [b, 1, t, rank], [b, 1, t, turning]
        assert ctx.relation is not None
        if ctx.relation.rotation is not None:
            content, turned = q.split(self.parts, dim=-1)
            q = torch.cat((content, ctx.relation.rotate(turned)), dim=-1)
            r = ctx.relation.rotate(r)
        q = q[:, :, -x.shape[1] :]  # the past is read, and asks for nothing
        c, r = ctx.append(c, r)
        if ctx.relation.absorbs:
            content, turned = q.split(self.parts, dim=-1)
            up = self.up.dense(0).unflatten(0, (self.heads, -1))  # [h, k - turning, rank]
            return torch.cat((content @ up, turned), dim=-1), torch.cat((c, r), dim=-1), c
        content, v = (split_heads(part, self.heads) for part in self.up.split(c.squeeze(1)))
        k = torch.cat((content, r.expand(-1, self.heads, -1, -1)), dim=-1)  # [b, h, s, k]
        return ctx.tap("q", q), ctx.tap("k", k), ctx.tap("v", v)

    def values(self, c: Tensor) -> Tensor:
        """What the heads read, [b, h, t, k_v], from the c that they read in its place."""
        return c @ self.up.dense(1).unflatten(0, (self.heads, -1)).mT

    def queries(self) -> Tensor:
        """The rows of weight that make the queries."""
        return self.query_up.rows() if isinstance(self.query_up, Linear) else self.down.rows(0)
