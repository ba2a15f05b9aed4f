"""Multi-head attention (Vaswani et al. 2017): self or cross, with grouped heads and any widths."""

import torch
from torch import Tensor, nn

from anyformer.attention.attend import attend, mix, weigh
from anyformer.attention.lowered import Lowered, Relation
from anyformer.attention.scores import Scoring
from anyformer.config import Attention, Projected, factor
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, OutBranch, split_heads
from anyformer.nn.norm import build_head_norm


class MultiHeadAttention(OutBranch):
    """out(concat_i g_i · softmax(q_i k_iᵀ · scale + mask + bias) v_i), each head a projection of the whole input.

    Self-attention projects its input to q, k and v in one matmul; `CrossAttention` and `LatentAttention` project
    otherwise. With fewer key/value heads (g < h) each serves h/g query heads. The gate is g_i = σ(x W_i), or 1 (Qiu et
    al. 2025). With a value residual v_i is a v_i + b v_i', where v' are values of the first layer (Zhou et al. 2024).
    """

    def __init__(self, spec: Attention, width: int):
        super().__init__()
        h, g, (k, k_v) = spec.heads, spec.groups, spec.widths(width)
        self.heads, self.groups = h, g
        self.add_projections(spec, width)
        self.q_norm, self.k_norm = (build_head_norm(spec.qk_norm, spec.qk_norm_over, n, k) for n in (h, g))
        self.norms, self.whole_norms = not spec.qk_norm.is_none, spec.qk_norm_over == "projection"
        self.gate = Linear(width, gates, bias=False) if (gates := spec.gate_size(width)) else None
        self.value_mix = nn.Parameter(torch.empty(2)) if spec.value_residual else None  # of own values, of the first's
        self.out = Linear(h * k_v, width, spec.output.bias) if isinstance(spec.output, Projected) else nn.Identity()
        self.scale, self.normalizer, self.dropout = factor(spec.scale, width, k), spec.normalizer, spec.dropout
        self.cap, self.sinks = spec.cap, nn.Parameter(torch.empty(h)) if spec.sinks else None

    def add_projections(self, spec: Attention, width: int) -> None:
        """Add the layers from the input to queries, keys and values."""
        h, g, (k, k_v) = spec.heads, spec.groups, spec.widths(width)
        rows = {"separate": (h * k, g * k, g * k_v), "shared_qk": (h * k, g * k_v), "shared_qkv": (h * k,)}
        self.qkv = Linear(width, rows[spec.projections], bias=spec.bias)
        # the parts of the projection that are query, key and value
        self.serves = {"separate": (0, 1, 2), "shared_qk": (0, 0, 1), "shared_qkv": (0, 0, 0)}[spec.projections]

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = self.project(x, ctx)  # [b, h, t, k], [b, g, s, k], [b, g, s, k_v]
        out = ctx.tap("heads", self.read(q, k, v, ctx))  # [b, h, t, k_v]
        if self.gate is not None:
            out = out * ctx.tap("gate", split_heads(self.gate(x), self.heads).sigmoid())  # [b, h, t, 1 or k_v]
        return self.out(out.transpose(1, 2).flatten(2))  # [b, t, h·k_v] -> [b, t, d]

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """[b, t, d] to queries [b, h, t, k], keys [b, g, s, k] and values [b, g, s, k_v]; earlier tokens included."""
        assert ctx.relation is not None
        direct = not self.norms and ctx.relation.rotation is None and self.value_mix is None
        read = x if ctx.memory is None else ctx.memory.append(x)
        q, k, v = self.shape_heads(self.qkv.split(read, direct), ctx.relation)
        q = q if ctx.memory is None else q[:, :, -x.shape[1] :]  # tokens of the segment memory are keys only
        if ctx.taps is not None:
            q, k, v = ctx.tap("q", q), ctx.tap("k", k), ctx.tap("v", v)
        return (q, k, v) if ctx.cache is None else (q, *ctx.append(k, v))

    def shape_heads(self, parts: tuple[Tensor, ...], relation: Relation) -> tuple[Tensor, Tensor, Tensor]:
        """[b, t, h·k], [b, t, g·k] and [b, t, g·k_v] to heads: normed, rotated, mixed with the first layer's values."""
        query, key, value = self.serves
        q = self.normed_heads(self.q_norm, parts[query], self.heads)
        k = self.normed_heads(self.k_norm, parts[key], self.groups)
        v = split_heads(parts[value], self.groups)
        if relation.rotation is not None:
            q, k = relation.scheme.rotate(q, relation.rotation), relation.scheme.rotate(k, relation.rotation)
        if self.value_mix is not None:
            assert relation.first_values is not None
            own, first = self.value_mix.to(v.dtype).unbind()
            v = own * v + first * relation.first_values.of(v)
        return q, k, v

    def normed_heads(self, norm: nn.Module, x: Tensor, heads: int) -> Tensor:
        """[b, t, h·k] -> [b, h, t, k], normed before or after."""
        x = norm(x) if self.norms and self.whole_norms else x
        x = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return norm(x) if self.norms and not self.whole_norms else x

    def read(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Return the values that each head reads, averaged by its weights, [b, h, t, k_v]."""
        relation = ctx.relation
        assert relation is not None
        if relation.whole is not None:
            k, v = relation.whole.gather(k, 2), relation.whole.gather(v, 2)
        scoring, mask = self.scoring, self.mask(relation, q, k)
        out = self.attend(q, k, v, mask, scoring)
        if ctx.taps is not None and ctx.taps.selects("weights"):  # recomputed; replaced ones replace the result
            weights = self.weigh(q, k, mask, scoring)
            if (changed := ctx.tap("weights", weights)) is not weights:
                out = mix(changed, v)
        return out

    def mask(self, relation: Relation, q: Tensor, k: Tensor) -> Lowered:
        """Return the mask of these queries and keys, with a bias where they determine one."""
        return relation.lowered

    # [b, h, t, k] queries, [b, g, s, k] keys and [b, g, s, k_v] values to [b, h, t, k_v]
    attend = staticmethod(attend)
    # [b, h, t, k] queries and [b, g, s, k] keys to the weights [b, h, t, s] by which `attend` adds values
    weigh = staticmethod(weigh)

    def reset(self) -> None:
        for own, start in ((self.sinks, 0), (self.value_mix, 0.5)):
            if own is not None:
                own.fill_(start)

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.scale, self.normalizer, self.cap, self.sinks, self.dropout if self.training else 0.0)
