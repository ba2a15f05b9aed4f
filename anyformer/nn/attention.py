"""Multi-head attention (Vaswani et al. 2017): self or cross, grouped heads, any widths, compressed or not."""

import torch
from torch import Tensor, nn

from anyformer.attention.attend import attend, mix, weigh
from anyformer.attention.lowered import Lowered, Relation
from anyformer.attention.scores import Scoring
from anyformer.config import Attention, Projected, factor
from anyformer.nn.attention_variants.latent import LatentProjection
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, OutBranch, split_heads
from anyformer.nn.norm import build_head_norm


class MultiHeadAttention(OutBranch):
    """out(concat_i g_i · softmax(q_i k_iᵀ · scale + mask + bias) v_i), each head a projection of the whole input.

    Self-attention projects its input to q, k and v in one matmul; cross-attention projects its input to q and the
    encoder's output to k and v. With fewer key/value heads (g < h) each serves h/g query heads.
    Latent attention computes all three from a compressed vector (`latent.py`). The gate is g_i = σ(x W_i), or 1 (Qiu et
    al. 2025). With a value residual v_i is a v_i + b v_i', where v' are values of the first layer (Zhou et al. 2024).
    """

    def __init__(self, spec: Attention, width: int, *, cross: bool = False):
        super().__init__()
        h, g, (k, k_v) = spec.heads, spec.groups, spec.widths(width)
        self.heads, self.groups, self.cross = h, g, cross
        self.latent: LatentProjection | None = None
        if cross:
            self.q = Linear(width, h * k, bias=spec.bias)
            self.kv = Linear(width, (g * k, g * k_v), bias=spec.bias)
        elif spec.latent:
            self.latent = LatentProjection(spec, spec.latent, width)
        else:
            rows = {"separate": (h * k, g * k, g * k_v), "shared_qk": (h * k, g * k_v), "shared_qkv": (h * k,)}
            self.qkv = Linear(width, rows[spec.projections], bias=spec.bias)
            # the parts of the projection that are query, key and value
            self.serves = {"separate": (0, 1, 2), "shared_qk": (0, 0, 1), "shared_qkv": (0, 0, 0)}[spec.projections]
        self.q_norm, self.k_norm = (build_head_norm(spec.qk_norm, spec.qk_norm_over, n, k) for n in (h, g))
        self.norms, self.whole_norms = not spec.qk_norm.is_none, spec.qk_norm_over == "projection"
        self.gate = Linear(width, gates, bias=False) if (gates := spec.gate_size(width)) else None
        self.value_mix = nn.Parameter(torch.empty(2)) if spec.value_residual else None  # of own values, of the first's
        self.out = Linear(h * k_v, width, spec.output.bias) if isinstance(spec.output, Projected) else nn.Identity()
        self.scale, self.normalizer, self.dropout = factor(spec.scale, width, k), spec.normalizer, spec.dropout
        self.cap, self.sinks = spec.cap, nn.Parameter(torch.empty(h)) if spec.sinks else None

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = (self._project_cross if self.cross else self.latent or self._project)(x, ctx)  # k, v: [b, g, s, k]
        out = ctx.tap("heads", self.read(q, k, v, ctx))  # [b, h, t, k_v]
        if self.gate is not None:
            out = out * ctx.tap("gate", split_heads(self.gate(x), self.heads).sigmoid())  # [b, h, t, 1 or k_v]
        return self.out(out.transpose(1, 2).flatten(2))  # [b, t, h·k_v] -> [b, t, d]

    def _project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """[b, t, d] to queries [b, h, t, k], keys [b, g, s, k] and values [b, g, s, k_v]; earlier tokens included."""
        assert ctx.relation is not None
        direct = not self.norms and ctx.relation.rotation is None and self.value_mix is None
        q, k, v = self.shape_heads(self.qkv.split(ctx.with_memory(x), direct), ctx.relation)
        q = q if ctx.memory is None else q[:, :, -x.shape[1] :]  # tokens of the segment memory are keys only
        if ctx.taps is not None:
            q, k, v = ctx.tap("q", q), ctx.tap("k", k), ctx.tap("v", v)
        return q, *ctx.append(k, v)

    def shape_heads(self, parts: tuple[Tensor, ...], relation: Relation) -> tuple[Tensor, Tensor, Tensor]:
        """[b, t, h·k], [b, t, g·k] and [b, t, g·k_v] to heads: normed, rotated, mixed with the first layer's values."""
        query, key, value = self.serves
        q = relation.rotate(self._normed_heads(self.q_norm, parts[query], self.heads))
        k = relation.rotate(self._normed_heads(self.k_norm, parts[key], self.groups))
        v = split_heads(parts[value], self.groups)
        if self.value_mix is not None:
            assert relation.first_values is not None
            own, first = self.value_mix.to(v.dtype).unbind()
            v = own * v + first * relation.first_values.of(v)
        return q, k, v

    def _project_cross(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        assert ctx.cross is not None
        q = ctx.tap("q", self._normed_heads(self.q_norm, self.q(x), self.heads))
        if ctx.cross.encoder_out is None:
            return q, *ctx.read_cross()
        k, v = self.kv.split(ctx.cross.encoder_out, direct=not self.norms)
        k, v = ctx.tap("k", self._normed_heads(self.k_norm, k, self.groups)), ctx.tap("v", split_heads(v, self.groups))
        if ctx.cache is not None:
            ctx.cache.layer.keep_cross(k, v)
        return q, k, v

    def _normed_heads(self, norm: nn.Module, x: Tensor, heads: int) -> Tensor:
        """[b, t, h·k] -> [b, h, t, k], normed before or after"""
        if not self.norms:
            return split_heads(x, heads)
        return split_heads(norm(x), heads) if self.whole_norms else norm(split_heads(x, heads))

    def read(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Return the values that each head reads, averaged by its weights, [b, h, t, k_v]."""
        relation = ctx.cross.relation if ctx.cross is not None and self.cross else ctx.relation
        assert relation is not None
        if relation.whole is not None:
            k, v = relation.whole.gather(k, 2), relation.whole.gather(v, 2)
        scoring, mask = self.scoring, self.mask(relation, q, k)
        out = self.attend(q, k, v, mask, scoring)
        out = self.latent.values(out) if self.latent and relation.absorbs else out
        if ctx.taps is not None and ctx.taps.selects("weights"):  # recomputed; replaced ones replace the result
            weights = self.weigh(q, k, mask, scoring)
            if (changed := ctx.tap("weights", weights)) is not weights:
                out = mix(changed, v)
        return out

    def mask(self, relation: Relation, q: Tensor, k: Tensor) -> Lowered:
        """Return the mask of these queries and keys, with a bias where they determine one."""
        return relation.lowered

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lowered: Lowered, scoring: Scoring) -> Tensor:
        """[b, h, t, k] queries, [b, g, s, k] keys and [b, g, s, k_v] values to [b, h, t, k_v]."""
        return attend(q, k, v, lowered, scoring, self.dropout if self.training else 0.0)

    def weigh(self, q: Tensor, k: Tensor, lowered: Lowered, scoring: Scoring) -> Tensor:
        """[b, h, t, k] queries and [b, g, s, k] keys to the weights [b, h, t, s] by which `attend` adds values."""
        return weigh(q, k, lowered, scoring)

    def reset(self) -> None:
        for own, start in ((self.sinks, 0), (self.value_mix, 0.5)):
            if own is not None:
                own.fill_(start)

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.scale, self.normalizer, self.cap, self.sinks)
