"""Attention: a mask lowered for a kernel once per forward pass, and the call of that kernel in each layer.

`choose` takes a kernel, `lower` makes of a pattern and two layouts what it reads, `attend` calls it. `eager` is the
readable reference; the other kernels must equal it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, assert_never

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyformer.attention.choose import Pair, Requirements, decide, decide_once, without_mask
from anyformer.attention.few_queries import few_queries
from anyformer.attention.flex import flex, lower_blocks
from anyformer.attention.layout import Layout, Role, sees
from anyformer.attention.lowered import (
    Blocks,
    Dense,
    Documents,
    FewQueries,
    Kernel,
    KernelChoice,
    Lowered,
    Relation,
    RotaryKernel,
    ShortRows,
    can_rotate,
    densify,
    mask_scores,
)
from anyformer.attention.position_module import Positions
from anyformer.attention.scores import Scoring, repeat_heads
from anyformer.attention.short_rows import lower_short_rows, short_rows
from anyformer.attention.varlen import lower_documents, varlen
from anyformer.config import Pattern, Position
from anyformer.config.visibility import EVERYTHING, PAST
from anyformer.kernels.private import functorch_is_active
from anyformer.kernels.runtime import HAS_TRITON, Runtime

Backend = Literal["auto", "eager", "sdpa", "short", "flex", "varlen", "decode"]

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def without_plans() -> Iterator[None]:
    """Keep `sdpa` from cuDNN, which makes a plan for each new shape: that takes longer than many calls.

    For calls of many shapes: steps that are not compiled, evaluations, prompts.
    """
    with sdpa_kernel(WITHOUT_PLANS):
        yield


def choose(
    backend: str, pattern: Pattern, q: Layout, k: Layout, role: Role, scheme: Position, needs: Requirements, at: Runtime
) -> KernelChoice:
    """Return the requested kernel, or the next best one if it cannot run; for `auto` the fastest one that can.

    Layouts with equal facts share one decision.
    """
    transformed, grads = at.device == "cuda" and functorch_is_active(), torch.is_grad_enabled()
    pair = Pair(q.facts, k.facts, role, q is k, grads, transformed, HAS_TRITON)
    return (decide if torch.compiler.is_compiling() else decide_once)(backend, pattern, pair, scheme, needs, at)


def lower(
    pattern: Pattern,
    q: Layout,
    k: Layout,
    role: Role,
    positions: Positions,
    needs: Requirements,
    runtime: Runtime,
    backend: str,
) -> Relation:
    """Choose a kernel and lower a pattern between two layouts for it."""
    choice = choose(backend, pattern, q, k, role, positions.scheme, needs, runtime)
    lowered: Lowered | None = choice.maskless
    if lowered is None:
        if choice.kernel == "decode" and needs.latent is not None:  # it finds no compressed vectors by a table
            k = k._replace(pages=None, origins=None)
        lowered = _lower_masked(choice.kernel, pattern, q, k, role, positions, runtime)
    # keys in a cache or of other processes are rotated already
    rotation, new = None, {"self": k, "cached": q, "part": q, "cross": None}[role]
    if new is not None and needs.rotary_width:
        by_axis = new.coordinates is not None and positions.scheme.reads_coordinates()
        where = new.coordinates if by_axis and new.coordinates is not None else new.positions
        rotation = positions.scheme.prepare(where, needs.rotary_width)
    scheme: Position | RotaryKernel = positions.scheme
    if rotation is not None and runtime.device == "cuda" and can_rotate(positions.scheme, rotation, needs.rotary_width):
        scheme = RotaryKernel()
    return Relation(
        lowered,
        choice,
        scheme,
        rotation,
        relative=positions.relative(q.positions, k.positions) if positions.relates else None,
        reads_in_place=isinstance(lowered, FewQueries) and (lowered.pages is not None or lowered.origins is not None),
    )


def _lower_masked(
    kernel: Kernel, pattern: Pattern, q: Layout, k: Layout, role: Role, positions: Positions, runtime: Runtime
) -> Lowered:
    """Lower a pattern for a kernel where it is not known that no mask is needed."""

    def bias() -> Tensor | None:
        return positions.bias(q.positions, k.positions, not pattern.looks_ahead)

    def dense() -> Dense:
        return lower_dense(pattern, q, k, role, bias())

    match kernel:
        case "flex":
            levels = positions.levels(not pattern.looks_ahead, q.positions.device)
            return lower_blocks(pattern, q, k, dense, positions.scheme, levels)
        case "short":
            return lower_short_rows(pattern, q, k, dense)
        case "varlen":
            return lower_documents(pattern, q, k, dense)
        case "decode":
            if k.pages is not None and sees_whole_rows(pattern, q, k, positions.scheme):
                return FewQueries(pages=k.pages)
            return lower_few(pattern, q, k, role, bias())._replace(pages=k.pages, origins=k.origins)
        case "eager" | "sdpa":
            form = mask_pairs(pattern, q, k, role, bias() if positions.biases else None)._replace(kernel=kernel)
            # torch would convert a boolean mask in every layer; a part of a row would also save each large copy
            if form.mask is None or not (role == "part" or (kernel == "sdpa" and runtime.device == "cpu")):
                return form
            return form._replace(mask=None, bias=torch.where(form.mask, 0.0, -torch.inf).to(runtime.dtype))
        case _:
            assert_never(kernel)


def sees_whole_rows(pattern: Pattern, q: Layout, k: Layout, scheme: Position) -> bool:
    """Return whether the newest token of each row, its only query, sees all keys of the row."""
    plain = q.marks is None and k.marks is None and not scheme.biases()
    return plain and pattern.as_window in (EVERYTHING, PAST) and q.positions.shape[1] == 1


def lower_dense(pattern: Pattern, q: Layout, k: Layout, role: Role, bias: Tensor | None = None) -> Dense:
    """Lower a pattern between two layouts to a mask, to a bias, or to neither if no mask is needed."""
    maskless = None if bias is not None else without_mask(pattern, q, k, role)
    return mask_pairs(pattern, q, k, role, bias) if maskless is None else maskless


def mask_pairs(pattern: Pattern, q: Layout, k: Layout, role: Role, bias: Tensor | None) -> Dense:
    """Lower a pattern between two layouts to a mask of all pairs, or to a bias with -inf where it hides keys."""
    mask, has_key = sees(pattern, q, k)[:, None], None
    if role == "cross" or not pattern.sees_self:  # a query may be fully masked: let it see all keys, zero it afterwards
        has_key = mask.any(dim=-1, keepdim=True)
        mask = mask | ~has_key
    if bias is not None:
        return Dense(bias=bias.masked_fill(~mask, -torch.inf), has_key=has_key)
    return Dense(mask=mask, has_key=has_key)


def lower_few(pattern: Pattern, q: Layout, k: Layout, role: Role, bias: Tensor | None = None) -> FewQueries:
    """Do the same for the kernel of few queries, which needs no care for fully masked ones."""
    if bias is None and without_mask(pattern, q, k, role) is not None:
        return FewQueries()
    mask = sees(pattern, q, k)[:, None]
    return FewQueries(mask) if bias is None else FewQueries(bias=bias.masked_fill(~mask, -torch.inf))


def attend(
    q: Tensor,  # [b, h, t, k]
    k: Tensor,  # [b, g, s, k]
    v: Tensor,  # [b, g, s, k_v]
    lowered: Lowered,
    scoring: Scoring,
) -> Tensor:
    """Return normalise(cap(q kᵀ · scale) + bias, where visible) v, [b, h, t, k_v].

    Queries without a visible key return zeros. The kernel was chosen when the mask was lowered (`choose.py`).
    """
    match lowered:
        case Dense(kernel="eager"):
            return mix(F.dropout(weigh(q, k, lowered, scoring), scoring.dropout), v)
        case Dense():
            return _sdpa(q, k, v, lowered, scoring)
        case FewQueries():
            return few_queries(q, k, v, lowered, scoring.scale)
        case ShortRows():
            return short_rows(q, k, v, lowered, scoring.scale, scoring.dropout)
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


def _sdpa(q: Tensor, k: Tensor, v: Tensor, dense: Dense, scoring: Scoring) -> Tensor:
    """Attention by torch's dense kernels, which have neither soft cap nor sinks nor a ReLU normalizer."""
    scale, normalizer, cap, sinks, dropout = scoring
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
