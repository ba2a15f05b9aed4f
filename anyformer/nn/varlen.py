"""Attention over documents one after the other, without a mask: flash kernels told where each begins."""

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer.config import Causal, Full, Pattern, Window
from anyformer.nn.mask import Layout

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
    """A relation as the varlen kernels take it: all rows in one, each run of a segment or of pads a document."""

    starts: Tensor  # int32 [n + 1], the last is the number of tokens; empty documents at the end
    longest: int
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


def lower(pattern: Pattern, layout: Layout) -> Documents:
    """Where each document begins; how many there are at most the layout knows, so nothing is read on the host."""
    window, segments, count = window_of(pattern), layout.segments, layout.documents
    assert window is not None
    assert segments is not None
    assert count is not None
    rows, length = segments.shape
    first = torch.ones_like(segments[:, :1], dtype=torch.bool)
    new = torch.cat((first, segments[:, 1:] != segments[:, :-1]), dim=1).flatten()
    number, total = new.cumsum(0) - 1, rows * length
    most = count + rows  # the pads of each row are one more
    starts = torch.full((most + 1,), total, dtype=torch.int32, device=segments.device)
    index = torch.arange(total, dtype=torch.int32, device=segments.device)
    starts = starts.scatter(0, torch.where(new, number, most), torch.where(new, index, total))
    return Documents(starts, length, window)


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> Tensor:
    """Attention within each document, [b, h, t, k_v]."""
    grouped = q.shape[1] != k.shape[1]
    options: dict[str, Any] = {}
    if grouped and "enable_gqa" in OPTIONS:
        options["enable_gqa"] = True
    elif grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    starts, longest, window = documents
    a, b, c = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [b·t, h, k]
    out = varlen_attn(a, b, c, starts, starts, longest, longest, scale=scale, window_size=window, **options)
    assert isinstance(out, Tensor)
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
