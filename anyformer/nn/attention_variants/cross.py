"""Cross-attention (Vaswani et al. 2017): queries of the decoder's tokens, keys and values of the encoder's output."""

from torch import Tensor

from anyformer.config import Attention
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, split_heads


class CrossAttention(MultiHeadAttention):
    """Attention from the decoder's tokens to the encoder's output, whose keys and values a cache holds."""

    def add_projections(self, spec: Attention, width: int) -> None:
        h, g, (k, k_v) = spec.heads, spec.groups, spec.widths(width)
        self.q = Linear(width, h * k, bias=spec.bias)
        self.kv = Linear(width, (g * k, g * k_v), bias=spec.bias)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """[b, t, d] to queries [b, h, t, k]; the encoder's output [b, s, d] to keys and values [b, g, s, k]."""
        assert ctx.cross is not None
        q = ctx.tap("q", self.normed_heads(self.q_norm, self.q(x), self.heads))
        if ctx.cross.encoder_out is None:
            return q, *ctx.read_cross()
        k, v = self.kv.split(ctx.cross.encoder_out, direct=not self.norms)
        k, v = ctx.tap("k", self.normed_heads(self.k_norm, k, self.groups)), ctx.tap("v", split_heads(v, self.groups))
        if ctx.cache is not None:
            ctx.cache.layer.keep_cross(k, v)
        return q, k, v

    def read(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        assert ctx.cross is not None
        return super().read(q, k, v, ctx._replace(relation=ctx.cross.relation))
