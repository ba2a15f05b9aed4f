"""Attention within short rows by Triton: a program reads all keys of a row and head at once.

Scores stay in registers, and the backward pass computes them again: nothing is stored but queries, keys and values.
"""

from typing import Any

import torch
from torch import Tensor

from anyformer.kernels.conventions import next_power_of_two
from anyformer.kernels.runtime import opaque, with_unit_stride

MIN_TILE = 16  # of a matmul by tensor cores
FORWARD_QUERIES, BACKWARD_QUERIES = 64, 32  # at once
# with these queries the fastest of 8 launches forward, in most of 7 shapes on an H200, and of 16 backward
LAUNCH = {"num_warps": 4, "num_stages": 1}


class ShortRowsFunction(torch.autograd.Function):
    """Attention [b, t, h, k] of queries [b, h, t, k], without second derivatives; options as in `attend_rows`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs[:6])
        ctx.options = inputs[6:]
        return attend_rows(*inputs)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint computes them when they are read
        found = attend_rows_backward(d_out, *saved, *ctx.options)
        dq, dk, dv = _split_heads(found, *saved[:2])
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), *(None,) * 8


def _like(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


@opaque("short_rows", _like)
def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seed: Tensor | None,
    before: int,
    after: int,
    scale: float,
    dropout: float,
    crosses: bool,
) -> Tensor:
    """Return attention [b, t, h, k]."""
    from anyformer.kernels import triton_short_rows

    q, k, v = (with_unit_stride(x) for x in (q, k, v))
    (b, h, t, width), (_, g, s, _), out = q.shape, k.shape, _like(q)
    tile = _tile(t, s, width, FORWARD_QUERIES)
    triton_short_rows.attend_rows[(b, h, -(-t // tile["T"]))](
        q, k, v, *_or_placeholder(q, q_segments, k_segments, seed), out, scale, *_thresholds(dropout),
        t, s, h, h // g, width, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        _row_stride(q_segments), _row_stride(k_segments), BEFORE=before, AFTER=after, SEGMENTS=q_segments is not None,
        DROPOUT=seed is not None, **tile, **LAUNCH,
    )  # fmt: skip
    return out


def _like_projections(d_out: Tensor, q: Tensor, k: Tensor, *options: Any) -> list[Tensor]:
    (b, h, t, width), (_, g, s, _), crosses = q.shape, k.shape, options[-1]
    if crosses:
        return [q.new_empty(b, t, h * width), q.new_empty(b, s, 2 * g * width)]
    return [q.new_empty(b, t, (h + 2 * g) * width)]


def _split_heads(projections: list[Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Return the views [b, t, h, k] of queries, keys and values in what one linear layer, or two, project."""
    width = q.shape[-1]
    columns = [heads * width for heads in (q.shape[1], k.shape[1], k.shape[1])]
    sides = [columns] if len(projections) == 1 else [columns[:1], columns[1:]]
    # along a positive axis, as autograd concatenates parts: the compiler then recognises both as the whole
    parts = [part for x, side in zip(projections, sides, strict=True) for part in x.split(side, dim=2)]
    return tuple(part.unflatten(2, (-1, width)) for part in parts)


@opaque("short_rows_backward", _like_projections)
def attend_rows_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    seed: Tensor | None,
    before: int,
    after: int,
    scale: float,
    dropout: float,
    crosses: bool,
) -> list[Tensor]:
    """Return the gradients of queries, keys and values from that of the output, as linear layers project them.

    Self-attention has one matrix [b, t, (h + 2 g) · k], cross-attention two: [b, t, h · k] and [b, s, 2 g · k].
    """
    from anyformer.kernels import triton_short_rows

    q, k, v, d_out = (with_unit_stride(x) for x in (q, k, v, d_out.transpose(1, 2)))
    (b, h, t, width), (_, g, s, _), found = q.shape, k.shape, _like_projections(d_out, q, k, crosses)
    dq, dk, dv = _split_heads(found, q, k)
    triton_short_rows.attend_rows_backward[(b, g)](
        q, k, v, d_out, *_or_placeholder(q, q_segments, k_segments, seed), dq, dk, dv, scale, *_thresholds(dropout),
        t, s, g, h // g, width, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_out.stride()[:3],
        _row_stride(q_segments), _row_stride(k_segments), *dq.stride()[:2], *dk.stride()[:2], BEFORE=before,
        AFTER=after, SEGMENTS=q_segments is not None, DROPOUT=seed is not None,
        **_tile(t, s, width, BACKWARD_QUERIES), **LAUNCH,
    )  # fmt: skip
    return found


def _or_placeholder(q: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Return the inputs, q in place of those that the kernel does not read."""
    return tuple(q if x is None else x for x in inputs)


def _thresholds(dropout: float) -> tuple[int, float]:
    """Return the hash below which a weight is dropped, and the factor of others."""
    return int(dropout * 2**31), 1 / (1 - dropout)


def _row_stride(segments: Tensor | None) -> int:
    """Return the distance between rows, 0 if all have the same segments."""
    return 0 if segments is None or len(segments) == 1 else segments.stride(0)


def _tile(t: int, s: int, width: int, queries: int) -> dict[str, int]:
    sizes = {"T": min(t, queries), "S": s, "K": width}
    return {name: max(MIN_TILE, next_power_of_two(size)) for name, size in sizes.items()}
