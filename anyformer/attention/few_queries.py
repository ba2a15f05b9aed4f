"""Attention of few queries to a cache: each group of heads reads its keys and values once, and none in empty slots."""

from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.attention.layout import Relation
from anyformer.conventions import next_power_of_two
from anyformer.kernels.runtime import supports_dependent_launch

FEW = 8  # queries
WIDEST = 256  # heads
LEAST = 64  # keys that are worth a program
KEYS = 128  # that one reads at once where heads are of 64 numbers or fewer
NUMBERS = 2048  # of keys that a warp reads at once for a single query
PROGRAMS = 256  # that fill a GPU, if they are of several warps


def decode(q: Tensor, k: Tensor, v: Tensor, relation: Relation, scale: float) -> Tensor:
    """What `attend` says of few queries [b, h, t, k], by a kernel that keeps no gradient."""
    mask = relation.mask if relation.bias is None else None  # a bias is -inf where masked
    mean = _read(q.to(k.dtype), k, v.to(k.dtype), mask, relation.bias, scale).to(q.dtype).transpose(1, 2)
    return mean if relation.alive is None else mean * relation.alive


class Shape(NamedTuple):
    """Of a program."""

    rows: int  # queries of a group
    keys: int  # at once
    warps: int


def shape_of(q: Tensor, v: Tensor, parts: int) -> Shape:
    """One query and its keys are a sum, which a warp finds by itself, unless programs are few and keys are many; more
    are products of no fewer than 16 rows."""
    (_, h, t, width), (b, g, s, k_v) = q.shape, v.shape
    rows, wide, slots = (
        h // g * t,
        max(16, next_power_of_two(max(width, k_v))),
        max(16, next_power_of_two(_blocks(s, parts))),
    )
    if rows == 1:
        warps = 4 if slots > KEYS and b * g * parts < 2 * PROGRAMS else 1
        return Shape(1, min(warps * NUMBERS // wide, slots), warps)
    return Shape(max(16, min(64, next_power_of_two(rows))), min(KEYS if wide <= 64 else LEAST, slots), 4)


def parts_of(q: Tensor, k: Tensor) -> int:
    """How many programs share the keys of a group: more than one where the rows alone do not fill a GPU."""
    return max(1, min(PROGRAMS // (k.shape[0] * k.shape[1]), k.shape[2] // LEAST))


@torch.library.custom_op("anyformer::read_cache", mutates_args=())
def _read(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    """The means [b, t, h, k_v]."""
    out = _like(q, k, v, mask, bias, scale)
    if (n := parts_of(q, k)) == 1:
        launch(q, k, v, mask, bias, scale, out[None], None)
        return out
    parts = out.new_empty(n, *out.shape, dtype=torch.float32)
    weights = parts.new_empty(parts.shape[:-1])
    launch(q, k, v, mask, bias, scale, parts, weights)
    join(parts, weights, out)
    return out


@_read.register_fake
def _like(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    out: Tensor,
    weights: Tensor | None,
) -> None:
    """Of each part of the keys the means [n, b, t, h, k_v], and, where they are asked for, log2 of the sums of their
    weights [n, b, t, h]."""
    from anyformer.kernels.triton_kernels import read_cache

    (b, h, t, width), (_, g, s, k_v), parts = q.shape, v.shape, len(out)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    early = supports_dependent_launch(q.device)
    rows, keys, warps = shape_of(q, v, parts)
    span = _blocks(_blocks(s, parts), keys) * keys
    read_cache[(b * g, parts, _blocks(h // g * t, rows))](
        q, k, v, q if mask is None else mask.view(torch.uint8), q if bias is None else bias,
        out, out if weights is None else weights, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *_strides(mask, b, (0, 2, 3)), *_strides(bias, b, (0, 1, 2, 3)), b * t * h,
        g, h // g, t, s, span, width, k_v,
        MASKED=mask is not None, BIASED=bias is not None, WHOLE=weights is None, EARLY=early, ROWS=rows, KEYS=keys,
        K=max(16, next_power_of_two(width)), V=max(16, next_power_of_two(k_v)),
        num_warps=warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def join(parts: Tensor, weights: Tensor, out: Tensor) -> None:
    """The means of all parts, each by its share."""
    from anyformer.kernels.triton_kernels import join_parts

    n, rows, width, early = len(parts), weights[0].numel(), parts.shape[-1], supports_dependent_launch(out.device)
    sizes = {"N": n, "NUMBER": next_power_of_two(n), "WIDTH": next_power_of_two(width)}
    join_parts[(rows,)](
        parts, weights, out, rows, width, **sizes, EARLY=early, num_warps=1, **({"launch_pdl": True} if early else {})
    )


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _strides(x: Tensor | None, batch: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """0 along what is the same for all."""
    return tuple(0 if x is None or x.shape[axis] == 1 else x.stride(axis) for axis in axes)
