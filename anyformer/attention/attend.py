"""Attention: one dispatch over the kernels. `eager` is the readable reference; the other kernels must equal it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, assert_never

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyformer.attention.few_queries import few_queries
from anyformer.attention.flex import flex
from anyformer.attention.lowered import Blocks, Dense, Documents, FewQueries, Lowered, ShortRows, densify, mask_scores
from anyformer.attention.scores import Scoring, repeat_heads
from anyformer.attention.short_rows import short_rows
from anyformer.attention.varlen import varlen

Backend = Literal["auto", "eager", "sdpa", "short", "flex", "varlen", "decode"]

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def without_plans() -> Iterator[None]:
    """Keep `sdpa` from cuDNN, which makes a plan for each new shape: that takes longer than many calls.

    For calls of many shapes: steps that are not compiled, evaluations, prompts.
    """
    with sdpa_kernel(WITHOUT_PLANS):
        yield


def attend(
    q: Tensor,  # [b, h, t, k]
    k: Tensor,  # [b, g, s, k]
    v: Tensor,  # [b, g, s, k_v]
    lowered: Lowered,
    scoring: Scoring,
    dropout: float = 0.0,
) -> Tensor:
    """Return normalise(cap(q kᵀ · scale) + bias, where visible) v, [b, h, t, k_v].

    Queries without a visible key return zeros. The kernel was chosen when the mask was lowered (`choose.py`).
    """
    match lowered:
        case Dense(kernel="eager"):
            return mix(F.dropout(weigh(q, k, lowered, scoring), dropout), v)
        case Dense():
            return _sdpa(q, k, v, lowered, scoring, dropout)
        case FewQueries():
            return few_queries(q, k, v, lowered, scoring.scale)
        case ShortRows():
            return short_rows(q, k, v, lowered, scoring.scale, dropout)
        case Blocks():
            return flex(q, k, v, lowered, scoring)
        case Documents():
            return varlen(q, k, v, lowered, scoring.scale)
        case _:
            assert_never(lowered)


def weigh(q: Tensor, k: Tensor, lowered: Lowered, scoring: Scoring) -> Tensor:
    """Return the attention weights [b, h, t, s]; rows are queries."""
    dense = densify(lowered)
    scores = mask_scores(scoring.scores(q, k), dense)
    match scoring.normalizer:
        case "relu":
            weights = scores.relu() / (scores > -torch.inf).sum(dim=-1, keepdim=True)
        case "softmax" if scoring.sinks is None:
            weights = scores.softmax(dim=-1)
        case "softmax":
            sink = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        case _:
            assert_never(scoring.normalizer)
    return (weights if dense.has_key is None else weights * dense.has_key).to(q.dtype)


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """Return the values averaged by the weights, [b, h, t, k_v]."""
    return weights @ repeat_heads(v, weights.shape[1])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, dense: Dense, scoring: Scoring, dropout: float) -> Tensor:
    """Attention by torch's dense kernels, which have neither soft cap nor sinks nor a ReLU normalizer."""
    scale, normalizer, cap, sinks = scoring
    supported = normalizer == "softmax" and cap is None and sinks is None
    assert supported, "sdpa was chosen for a layer that needs eager"
    if scale <= 0:  # torch's causal kernel scales after masking, and 0 · -inf is NaN
        q, scale = q * scale, 1.0
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=dense.mask if dense.bias is None else dense.bias.to(q.dtype),
        is_causal=dense.causal,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out if dense.has_key is None else out * dense.has_key
