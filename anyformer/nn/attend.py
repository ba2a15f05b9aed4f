"""Attention kernels, and nothing else knows them. `eager` is the readable reference; the others must equal it."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.nn.mask import Relation
from anyformer.nn.norm import at_least_fp32

Backend = Literal["auto", "eager", "sdpa"]
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
) -> Tensor:
    """normalise(q kᵀ · scale + bias, where visible) v, [b, h, t, k_v]; a row that sees nothing is zero."""
    match choose(backend, normalizer):
        case "eager":
            weights = weigh(q, k, relation, scale, normalizer)
            return mix(F.dropout(weights, dropout), v)
        case "sdpa":
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


def choose(backend: str, normalizer: Normalizer) -> Literal["eager", "sdpa"]:
    """The kernel that runs: what was asked for if it can, else what can."""
    match backend:
        case "eager":
            return "eager"
        case "auto" | "sdpa":
            return "sdpa" if normalizer == "softmax" else "eager"  # no kernel normalises by ReLU
        case _:
            raise ValueError(f"backend = {backend!r}: must be 'auto', 'eager' or 'sdpa'")


def weigh(q: Tensor, k: Tensor, relation: Relation, scale: float, normalizer: Normalizer = "softmax") -> Tensor:
    """The attention weights [b, h, t, s]; rows are queries."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # each key head serves h/g query heads
    scores = at_least_fp32(q @ k.transpose(-1, -2)) * scale
    if relation.bias is not None:
        scores = scores + relation.bias
    if relation.mask is not None:
        scores = scores.masked_fill(~relation.mask, -torch.inf)
    if relation.causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    if normalizer == "softmax":
        weights = scores.softmax(dim=-1)
    else:
        weights = scores.relu() / (scores > -torch.inf).sum(dim=-1, keepdim=True)
    return (weights if relation.alive is None else weights * relation.alive).to(q.dtype)


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """The values averaged by the weights, [b, h, t, k_v]."""
    return weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
