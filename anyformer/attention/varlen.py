"""Attention over documents one after the other, without a mask: flash kernels told where each begins."""

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer.attention.layout import Layout
from anyformer.config import Causal, Full, Pattern, Window
from anyformer.conventions import PADDING

if torch.backends.cuda.is_built():
    try:
        from torch.nn.attention.varlen import varlen_attn

        OPTIONS = set(signature(varlen_attn).parameters)
    except ImportError:
        OPTIONS = set()


def __getattr__(name: str) -> Any:
    """The options where no kernel can run, for those who ask what would: the import takes as long as torch's own."""
    if name != "OPTIONS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch.nn.attention import varlen

    return set(signature(varlen.varlen_attn).parameters)


class Documents(NamedTuple):
    """A relation as the varlen kernels take it: all rows in one, each run of a segment or of pads a document. Keys have
    as many as queries, some of which may be empty."""

    starts: Tensor  # int32 [n + 1], the last is the number of tokens; empty documents at the end
    longest: int
    key_starts: Tensor
    key_longest: int
    window: tuple[int, int]  # tokens back and ahead, -1 without end


def window_of(pattern: Pattern) -> tuple[int, int] | None:
    """What the kernels take in place of a pattern, where they can."""
    match pattern:
        case Full():
            return -1, -1
        case Causal():
            return -1, 0
        case Window(globals=0, before=before, after=after):
            return before, after
        case _:
            return None


def lower(pattern: Pattern, q: Layout, k: Layout) -> Documents:
    """Where each document begins; how many there are at most layouts know, so nothing is read on the host."""
    window, longest = window_of(pattern), q.positions.shape[1]
    assert window is not None
    if q is k:
        starts = _runs(q)
        return Documents(starts, longest, starts, longest, window)
    return Documents(*_side(q, q, k), *_side(k, q, k), window)


def _runs(layout: Layout) -> Tensor:
    segments, count = layout.segments, layout.documents
    assert segments is not None
    assert count is not None
    rows, length = segments.shape
    first = torch.ones_like(segments[:, :1], dtype=torch.bool)
    new = torch.cat((first, segments[:, 1:] != segments[:, :-1]), dim=1).flatten()
    number, total = new.cumsum(0) - 1, rows * length
    most = count + rows  # the pads of each row are one more
    starts = torch.full((most + 1,), total, dtype=torch.int32, device=segments.device)
    index = torch.arange(total, dtype=torch.int32, device=segments.device)
    return starts.scatter(0, torch.where(new, number, most), torch.where(new, index, total))


def _side(own: Layout, q: Layout, k: Layout) -> tuple[Tensor, int]:
    """Where the documents of one of two texts begin: those of a row are numbered from 0, alike in both, and its pads
    are one more."""
    segments = own.segments
    assert segments is not None
    assert q.segments is not None
    assert k.segments is not None
    (rows, length), most = segments.shape, max(q.documents or 0, k.documents or 0) + segments.shape[0]
    pads = torch.maximum(q.segments.amax(1), k.segments.amax(1)) + 1  # their number in a row
    before = (pads + 1).cumsum(0) - pads - 1  # documents in the rows above
    number = before[:, None] + torch.where(segments == PADDING, pads[:, None], segments)
    sizes = torch.zeros(most + 1, dtype=torch.int32, device=segments.device)
    ones = torch.ones(rows * length, dtype=torch.int32, device=segments.device)
    return sizes.scatter_add(0, number.flatten() + 1, ones).cumsum(0, dtype=torch.int32), length


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> Tensor:
    """Attention within each document, [b, h, t, k_v]."""
    grouped = q.shape[1] != k.shape[1]
    options: dict[str, Any] = {}
    if grouped and "enable_gqa" in OPTIONS:
        options["enable_gqa"] = True
    elif grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    starts, longest, key_starts, key_longest, window = documents
    a, b, c = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [b·t, h, k]
    out = varlen_attn(a, b, c, starts, key_starts, longest, key_longest, scale=scale, window_size=window, **options)
    assert isinstance(out, Tensor)
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
