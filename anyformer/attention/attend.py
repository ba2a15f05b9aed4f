"""Attention at work. `eager` is the readable reference; the other kernels must equal it."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.few_queries import WIDEST, decode
from anyformer.attention.flex import flex
from anyformer.attention.layout import Relation
from anyformer.attention.varlen import varlen
from anyformer.kernels.runtime import at_least_fp32

Backend = Literal["auto", "eager", "sdpa", "flex", "varlen", "decode"]
Normalizer = Literal["softmax", "relu"]


def attend(
    q: Tensor,  # [b, h, t, k]
    k: Tensor,  # [b, g, s, k]
    v: Tensor,  # [b, g, s, k_v]
    relation: Relation,
    scale: float,
    normalizer: Normalizer = "softmax",
    dropout: float = 0.0,
    backend: str = "auto",
    cap: float | None = None,
    sinks: Tensor | None = None,  # [h]
) -> Tensor:
    """normalise(cap(q kᵀ · scale) + bias, where visible) v, [b, h, t, k_v]; a row that sees nothing is zero.

    A relation that was lowered for a kernel runs on it; a dense one on `sdpa`, or on `eager` where that is asked for or
    nothing else can.
    """
    if relation.blocks is not None:
        return flex(q, k, v, relation.blocks, scale, cap, sinks)
    if relation.documents is not None:
        return varlen(q, k, v, relation.documents, scale)
    if relation.few and max(q.shape[-1], v.shape[-1]) <= WIDEST:  # compressed vectors are wider than heads
        return decode(q, k, v, relation, scale)
    if backend == "eager" or needs_eager(normalizer, cap, sinks is not None):
        weights = weigh(q, k, relation, scale, normalizer, cap, sinks)
        return mix(F.dropout(weights, dropout), v)
    if scale <= 0:  # torch's causal kernel scales after masking, and 0 · -inf is NaN
        q, scale = q * scale, 1.0
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=relation.mask if relation.bias is None else relation.bias.to(q.dtype),
        is_causal=relation.causal,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out if relation.alive is None else out * relation.alive


def needs_eager(normalizer: Normalizer, cap: float | None, sinks: bool) -> str | None:
    """Why torch's dense kernels cannot do it."""
    if normalizer != "softmax":
        return "no kernel normalises by ReLU"
    return "sdpa has no soft cap" if cap is not None else "sdpa has no sinks" if sinks else None


def weigh(
    q: Tensor,
    k: Tensor,
    relation: Relation,
    scale: float,
    normalizer: Normalizer = "softmax",
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention weights [b, h, t, s]; rows are queries."""
    relation = relation.dense()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # each key head serves h/g query heads
    scores = at_least_fp32(q @ k.transpose(-1, -2)) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if relation.bias is not None:
        scores = scores + relation.bias
    if relation.mask is not None:
        scores = scores.masked_fill(~relation.mask, -torch.inf)
    if relation.causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    if normalizer == "relu":
        weights = scores.relu() / (scores > -torch.inf).sum(dim=-1, keepdim=True)
    elif sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights if relation.alive is None else weights * relation.alive).to(q.dtype)


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """The values averaged by the weights, [b, h, t, k_v]."""
    return weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
