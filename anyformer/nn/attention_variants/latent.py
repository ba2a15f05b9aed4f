"""Multi-head latent attention (DeepSeek-V2, 2024): queries, keys and values from a compressed vector."""

import torch
from torch import Tensor, nn

from anyformer.config import Attention, Latent
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, split_heads


class LatentProjection(nn.Module):
    """k_i = [c W_ki ; r] and v_i = c W_vi, with c = N(x W_c) and r = rotate(x W_r) shared by all heads.

    The last part of a query is rotated, too. With `query_rank` queries are compressed as well: q = N(x W_a) W_b.
    A cache stores c and r. Since q·(c W_k) = (q W_kᵀ)·c, a few new tokens can read them directly, as the key [c ; r]
    and the value c of a single head (`Relation.absorbs`). For many new tokens, or when taps are attached, all keys and
    values are expanded.
    """

    def __init__(self, spec: Attention, compress: Latent, width: int):
        super().__init__()
        h, rank, rotary = spec.heads, compress.rank, compress.rotary_width
        k, k_v = spec.widths(width)
        self.heads, self.parts = h, (k - rotary, rotary)
        query = compress.query_rank
        self.down = Linear(width, (query or h * k, rank, rotary), bias=spec.bias)
        self.query_norm = compress.norm.build(query) if query else nn.Identity()
        self.query_up = Linear(query, h * k, bias=False) if query else nn.Identity()
        self.norm = compress.norm.build(rank)
        self.up = Linear(rank, (h * (k - rotary), h * k_v), bias=False)

    def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, c, r = self.down.split(x if ctx.memory is None else ctx.memory.append(x))
        q = split_heads(self.query_up(self.query_norm(q)), self.heads)
        c, r = ctx.tap("latent", self.norm(c)).unsqueeze(1), r.unsqueeze(1)  # [b, 1, t, rank], [b, 1, t, rotary]
        assert ctx.relation is not None
        if ctx.relation.rotation is not None:
            content, rotated = q.split(self.parts, dim=-1)
            q = torch.cat((content, ctx.relation.scheme.rotate(rotated, ctx.relation.rotation)), dim=-1)
            r = ctx.relation.scheme.rotate(r, ctx.relation.rotation)
        q = q[:, :, -x.shape[1] :]  # tokens of the segment memory are keys only
        c, r = ctx.append(c, r)
        if ctx.relation.absorbs:
            content, rotated = q.split(self.parts, dim=-1)
            up = self.up.dense(0).unflatten(0, (self.heads, -1))  # [h, k - rotary, rank]
            return torch.cat((content @ up, rotated), dim=-1), torch.cat((c, r), dim=-1), c
        content, v = (split_heads(part, self.heads) for part in self.up.split(c.squeeze(1)))
        k = torch.cat((content, r.expand(-1, self.heads, -1, -1)), dim=-1)  # [b, h, s, k]
        return ctx.tap("q", q), ctx.tap("k", k), ctx.tap("v", v)

    def values(self, c: Tensor) -> Tensor:
        """Return the heads' outputs [b, h, t, k_v] from the c that they read in place of values."""
        return c @ self.up.dense(1).unflatten(0, (self.heads, -1)).mT

    def queries(self) -> Tensor:
        """Return the rows of the weight that project the queries."""
        return self.query_up.rows() if isinstance(self.query_up, Linear) else self.down.rows(0)


class LatentAttention(MultiHeadAttention):
    """Self-attention whose queries, keys and values are those of a `LatentProjection`."""

    latent: LatentProjection

    def add_projections(self, spec: Attention, width: int) -> None:
        assert spec.latent is not None
        self.latent = LatentProjection(spec, spec.latent, width)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.latent(x, ctx)
        return q, k, v

    def read(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        out = super().read(q, k, v, ctx)
        return self.latent.values(out) if ctx.relation is not None and ctx.relation.absorbs else out
