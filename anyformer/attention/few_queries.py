"""Attention of few queries to a KV cache: each group of heads reads its keys and values once, and no empty slots.

Where queries, groups and keys are few, each query has its own programs instead, since the cache is small then."""

from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.attention.lowered import FewQueries
from anyformer.kernels.conventions import next_power_of_two
from anyformer.kernels.runtime import opaque, supports_dependent_launch, with_unit_stride

MAX_QUERIES = 8
MAX_HEAD_WIDTH = 256
MIN_KEYS_PER_PROGRAM = 64
KEYS_PER_TILE = 128  # for heads of at most 64 elements; wider heads take MIN_KEYS_PER_PROGRAM
ELEMENTS_PER_WARP = 2048  # of the keys that a warp loads at once for a single query
FULL_GRID = 256  # programs of several warps that fill a GPU
PAGED_GRID = 1024  # the same for rows of pages, whose lengths differ
MIN_PAGED_KEYS = 256  # of a row, read by one program
ONE_BY_ONE_QUERIES = 8  # at most, of a group: each has its own programs of one warp
ONE_BY_ONE_SLOTS = 1024  # at most, of the cache
ONE_BY_ONE_KEYS = 16  # of such a program, at least


def few_queries(q: Tensor, k: Tensor, v: Tensor, lowered: FewQueries, scale: float) -> Tensor:
    """Return attention of few queries [b, h, t, k], as `attend` defines it; the kernel has no backward pass.

    A fully masked query has no softmax weights: the kernel returns zeros for it.
    """
    if lowered.reads_whole_rows:
        return _read_rows(q, k, v, lowered, scale)
    mask = lowered.mask if lowered.bias is None else None  # a bias is -inf where masked
    table, size = (lowered.origins, 0) if lowered.pages is None else lowered.pages[:2]
    mean = _read_cache(q.to(k.dtype), k, v.to(k.dtype), mask, lowered.bias, table, size, scale)
    return mean.to(q.dtype).transpose(1, 2)


def _read_rows(q: Tensor, k: Tensor, v: Tensor, lowered: FewQueries, scale: float) -> Tensor:
    """Return attention of one query per row [b, h, 1, k] to all its keys, in pages of pools."""
    from anyformer.kernels.triton_paged import read_pages

    assert lowered.pages is not None
    (table, size, lengths), dtype = lowered.pages, q.dtype
    q = q.to(k.dtype)
    q = with_unit_stride(q)
    (b, h, _, width), (_, g, _, k_v) = q.shape, v.shape
    slots = table.shape[1] * size
    parts = max(1, min(PAGED_GRID // (b * g), slots // MIN_PAGED_KEYS))
    out = q.new_empty(b, 1, h, k_v)
    to, weights = out[None], out
    if parts > 1:
        to = out.new_empty(parts, *out.shape, dtype=torch.float32)
        weights = to.new_empty(to.shape[:-1])
    shared, widest = h // g, max(16, next_power_of_two(max(width, k_v)))
    rows = 1 if shared == 1 else max(16, next_power_of_two(shared))
    keys = max(16, min(64 if rows > 1 else ELEMENTS_PER_WARP // widest, next_power_of_two(slots)))
    span = _ceil_div(_ceil_div(slots, parts), keys) * keys
    read_pages[(b * g, parts)](
        q, k, v, table, lengths.contiguous(), to, weights, scale, *q.stride()[:2], *k.stride()[1:3], *v.stride()[1:3],
        table.stride(0), b * h, g, shared, span, width, k_v,
        PAGE=size, WHOLE=parts == 1, ROWS=rows, KEYS=keys, STAGES=3 if rows > 1 else 1,
        K=max(16, next_power_of_two(width)), V=max(16, next_power_of_two(k_v)), num_warps=4 if rows > 1 else 1,
    )  # fmt: skip
    if parts > 1:
        join(to, weights, out)
    return out.to(dtype).transpose(1, 2)


class Tile(NamedTuple):
    """Sizes of one program of the kernel."""

    rows: int  # queries of a group
    keys: int  # loaded at once
    warps: int


def tile_of(q: Tensor, v: Tensor, slots: int, parts: int) -> Tile:
    """Return the tile for a problem.

    One query: a reduction by one warp, or by four if the grid is small and there are many keys. Several queries:
    `tl.dot`, which needs at least 16 rows, unless one by one is faster.
    """
    (b, h, t, width), (_, g, _, k_v) = q.shape, v.shape
    rows, widest = h // g * t, max(16, next_power_of_two(max(width, k_v)))
    one_by_one = reads_one_by_one(b * g, rows, slots)
    slots = max(16, next_power_of_two(_ceil_div(slots, parts)))
    if one_by_one:
        return Tile(1, min(ELEMENTS_PER_WARP // widest, slots), 1)
    if rows == 1:
        warps = 4 if slots > KEYS_PER_TILE and b * g * parts < 2 * FULL_GRID else 1
        return Tile(1, min(warps * ELEMENTS_PER_WARP // widest, slots), warps)
    keys = KEYS_PER_TILE if widest <= 64 else MIN_KEYS_PER_PROGRAM
    return Tile(max(16, min(64, next_power_of_two(rows))), min(keys, slots), 4)


def count_parts(grid: int, rows: int, slots: int) -> int:
    """Return how many programs share the keys of a group: several if the groups of all texts do not fill a GPU."""
    if reads_one_by_one(grid, rows, slots):
        return max(1, min(2 * FULL_GRID // (grid * rows), slots // ONE_BY_ONE_KEYS))
    return max(1, min(FULL_GRID // grid, slots // MIN_KEYS_PER_PROGRAM))


def reads_one_by_one(grid: int, rows: int, slots: int) -> bool:
    """Return whether each query of a group has a program of one warp: they are few, and so are the groups and keys."""
    return 1 < rows <= ONE_BY_ONE_QUERIES and grid * rows <= 2 * FULL_GRID and slots <= ONE_BY_ONE_SLOTS


def _like(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    size: int,
    scale: float,
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


@opaque("read_cache", _like)
def _read_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    size: int,
    scale: float,
) -> Tensor:
    """Return the means of the values [b, t, h, k_v].

    With a table of pages of `size` tokens, keys and values are pools of them. With a size of 0 the table has the row
    that holds each key, int [b, s].
    """
    out = _like(q, k, v, mask, bias, table, size, scale)
    slots = table.shape[1] * size if table is not None and size else k.shape[2]
    problem = Problem(q, k, v, mask, bias, table, size, slots, scale)
    grid, rows = len(q) * v.shape[1], q.shape[1] // v.shape[1] * q.shape[2]
    if (n := count_parts(grid, rows, slots)) == 1:
        launch(problem, out[None], None)
        return out
    parts = out.new_empty(n, *out.shape, dtype=torch.float32)
    weights = parts.new_empty(parts.shape[:-1])
    launch(problem, parts, weights)
    join(parts, weights, out)
    return out


class Problem(NamedTuple):
    """The inputs of the kernel."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    table: Tensor | None  # int [b, pages], or the row of each key [b, s]
    size: int  # tokens of a page; 0: there are none
    slots: int  # keys of a row, visible or not
    scale: float


def launch(problem: Problem, out: Tensor, weights: Tensor | None) -> None:
    """Write the mean of each part of the keys to `out` [n, b, t, h, k_v].

    With `weights` [n, b, t, h], also write log2 of the sum of each part's softmax weights.
    """
    from anyformer.kernels.triton_kernels import read_cache

    q, k, v, mask, bias, table, size, s, scale = problem
    (b, h, t, width), (_, g, _, k_v), parts = q.shape, v.shape, len(out)
    q, k, v = (with_unit_stride(x) for x in (q, k, v))
    early = supports_dependent_launch(q.device)
    rows, keys, warps = tile_of(q, v, s, parts)
    span = _ceil_div(_ceil_div(s, parts), keys) * keys
    read_cache[(b * g, parts, _ceil_div(h // g * t, rows))](
        q, k, v, q if mask is None else mask.view(torch.uint8), q if bias is None else bias,
        q if table is None else table, out, out if weights is None else weights, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *_strides(mask, (0, 2, 3)), *_strides(bias, (0, 1, 2, 3)), b * t * h,
        0 if table is None else table.stride(0), g, h // g, t, s, span, width, k_v,
        PAGE=size, ORIGINS=table is not None and not size, MASKED=mask is not None, BIASED=bias is not None,
        WHOLE=weights is None, EARLY=early, ROWS=rows, KEYS=keys,
        K=max(16, next_power_of_two(width)), V=max(16, next_power_of_two(k_v)),
        num_warps=warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def join(parts: Tensor, weights: Tensor, out: Tensor) -> None:
    """Write the mean over all parts, weighted by their softmax weights, to `out`."""
    from anyformer.kernels.triton_kernels import join_parts

    n, rows, width, early = len(parts), weights[0].numel(), parts.shape[-1], supports_dependent_launch(out.device)
    sizes = {"N": n, "PARTS": next_power_of_two(n), "WIDTH": next_power_of_two(width)}
    join_parts[(rows,)](
        parts, weights, out, rows, width, **sizes, EARLY=early, num_warps=1, **({"launch_pdl": True} if early else {})
    )


def _ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def _strides(x: Tensor | None, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides along some axes, 0 where a size is 1: the values are broadcast."""
    return tuple(0 if x is None or x.shape[axis] == 1 else x.stride(axis) for axis in axes)
