"""Attention over concatenated documents without a mask: flash kernels that take the start of each document."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from anyformer.attention.layout import Layout
from anyformer.attention.lowered import Dense, Documents
from anyformer.attention.scores import repeat_heads
from anyformer.config import Pattern
from anyformer.kernels.conventions import PADDING

if torch.backends.cuda.is_built():
    try:
        from torch.nn.attention.varlen import varlen_attn

        OPTIONS = set(signature(varlen_attn).parameters)
    except ImportError:
        OPTIONS = set()


def __getattr__(name: str) -> Any:
    """Compute OPTIONS on demand where the kernels cannot run: importing them takes as long as importing torch."""
    if name != "OPTIONS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.nn.attention import varlen

    return set(signature(varlen.varlen_attn).parameters)


def lower_documents(pattern: Pattern, q: Layout, k: Layout, densify: Callable[[], Dense]) -> Documents:
    """Return where each document begins.

    Layouts know the largest number of documents, so nothing is read on the host.
    """
    window, longest = pattern.as_window, q.positions.shape[1]
    assert window is not None
    if q is k:
        starts = _starts(q)
        return Documents(starts, longest, starts, longest, window, densify)
    return Documents(*_starts_of_pair(q, q, k), *_starts_of_pair(k, q, k), window, densify)


def _starts(layout: Layout) -> Tensor:
    """Return where each document of a layout begins, int32 [n + 1]."""
    segments, count = layout.segments, layout.documents
    assert segments is not None
    assert count is not None
    rows, length = segments.shape
    first = torch.ones_like(segments[:, :1], dtype=torch.bool)
    new = torch.cat((first, segments[:, 1:] != segments[:, :-1]), dim=1).flatten()
    number, total = new.cumsum(0) - 1, rows * length
    most = count + rows  # the padding of each row is one more document
    starts = torch.full((most + 1,), total, dtype=torch.int32, device=segments.device)
    index = torch.arange(total, dtype=torch.int32, device=segments.device)
    return starts.scatter(0, torch.where(new, number, most), torch.where(new, index, total))


def _starts_of_pair(own: Layout, q: Layout, k: Layout) -> tuple[Tensor, int]:
    """Return where the documents of one of two texts begin, and the longest row.

    In each row the documents of both texts are numbered alike from 0; the padding is one more document.
    """
    segments = own.segments
    assert segments is not None
    assert q.segments is not None
    assert k.segments is not None
    (rows, length), most = segments.shape, max(q.documents or 0, k.documents or 0) + segments.shape[0]
    pads = torch.maximum(q.segments.amax(1), k.segments.amax(1)) + 1  # the number of a row's padding document
    before = (pads + 1).cumsum(0) - pads - 1  # documents in the rows above
    number = before[:, None] + torch.where(segments == PADDING, pads[:, None], segments)
    sizes = torch.zeros(most + 1, dtype=torch.int32, device=segments.device)
    ones = torch.ones(rows * length, dtype=torch.int32, device=segments.device)
    return sizes.scatter_add(0, number.flatten() + 1, ones).cumsum(0, dtype=torch.int32), length


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> Tensor:
    """Return attention within each document, [b, h, t, k_v]."""
    grouped = q.shape[1] != k.shape[1]
    options: dict[str, Any] = {}
    if grouped and "enable_gqa" in OPTIONS:
        options["enable_gqa"] = True
    elif grouped:
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
    a, b, c = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [b·t, h, k]
    starts, longest, key_starts, key_longest, window, _ = documents
    out = varlen_attn(a, b, c, starts, key_starts, longest, key_longest, scale=scale, window_size=window, **options)
    assert isinstance(out, Tensor)
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
