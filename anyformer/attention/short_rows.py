"""Attention within short rows, with a mask or without, by the kernels of `kernels/short_rows.py`.

Long rows need several tiles; for those there are `varlen` and `flex`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from anyformer.attention.layout import Layout
from anyformer.attention.lowered import Dense, ShortRows
from anyformer.config import Pattern
from anyformer.kernels.runtime import Runtime
from anyformer.kernels.short_rows import ShortRowsFunction

MAX_ROW = 128  # tokens: the scores of some queries with this many keys fit in the registers of a program
MAX_HEAD_WIDTH = 64  # wider heads need more shared memory than GPUs before Hopper have, and gain little


def lower_short_rows(pattern: Pattern, q: Layout, k: Layout, densify: Callable[[], Dense]) -> ShortRows:
    """Return the segments of both sides; None if neither layout has any."""
    window = pattern.as_window
    assert window is not None
    if q.segments is None and k.segments is None:
        return ShortRows(None, None, window, k is not q, densify)
    a, b = (side.segment_ids.to(torch.int32).contiguous() for side in (q, k))
    # a view: torch 2.13 breaks the graph at a custom function that is given the same tensor twice
    return ShortRows(a, a.view_as(a) if k is q else b, window, k is not q, densify)


def short_rows(q: Tensor, k: Tensor, v: Tensor, rows: ShortRows, scale: float, dropout: float) -> Tensor:
    """Return attention within each segment, [b, h, t, k]."""
    dtype = Runtime.of(v, training=True).dtype
    seed = torch.randint(2**31 - 1, (), device=q.device, dtype=torch.int32) if dropout else None
    tensors = (q.to(dtype), k.to(dtype), v.to(dtype), rows.q_segments, rows.k_segments, seed)
    out: Tensor = ShortRowsFunction.apply(*tensors, *rows.window, scale, dropout, rows.crosses)
    return out.transpose(1, 2)
