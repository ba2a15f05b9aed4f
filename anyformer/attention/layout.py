"""Token layouts: the position, segment and mark of every token, and which keys a query sees (see `docs/masks.md`).

A query sees a key if their segments are equal and

    the pattern allows it, pattern.sees(q_position, k_position), or
    the key is marked SEEN (a prefix: its whole segment sees it), or
    the query is marked SEER (a global token: it also sees its whole segment), or
    both have the same negative mark (a group, such as the patches of one image: its tokens see each other).

Visibility depends on these facts, never on the index of a token in its row. Padding is segment -1, packed documents are
different segments, an empty cache slot is segment -1. So training, packing, left and right padding, chunked prefill and
decoding share one code path. A padding token attends to padding, so no query of self-attention is fully masked. Facts
that make a mask unnecessary are Python values, set when the layout is made: nothing here reads a tensor on the host.
"""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from anyformer.config import Pattern
from anyformer.kernels.conventions import PADDING, PLAIN, SEEN, SEER

# keys: the same tokens; a cache that holds them too; another sequence; whole rows, of which the queries are a part
Role = Literal["self", "cached", "cross", "part"]


class Pages(NamedTuple):
    """Where a paged cache holds the keys of each row: token i in slot i % size of page table[row, i // size]."""

    table: Tensor  # int [b, pages]
    size: int  # tokens of a page
    lengths: Tensor  # int [b]: tokens of each row


class WholeRows(Protocol):
    """The rows of a batch of which each process holds a part (context parallelism)."""

    @property
    def layout(self) -> "Layout":
        """The layout of whole rows."""

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return x, whose axis `dim` is the tokens of this process, for whole rows, in the order of `layout`."""


class Facts(NamedTuple):
    """Facts about the tokens of a layout, known without reading them."""

    length: int
    marks: Literal[True] | None  # None: no token is marked, as in a layout
    segmented: bool
    ordered: bool
    packed: bool
    padding: str
    is_arange: bool
    has_documents: bool


class Layout(NamedTuple):
    """Position, segment and mark of every token of a batch."""

    positions: Tensor  # int [b or 1, t]
    segments: Tensor | None = None  # int [b, t]; None: one segment, every token real
    marks: Tensor | None = None  # int [b, t]: SEEN, SEER, or negative: the number of a group; None: no token is marked
    ordered: bool = False  # positions grow with the index within each segment
    packed: bool = True  # a row may hold several segments
    padding: Literal["none", "right", "any"] = "any"
    position_bound: int | None = None  # all positions are below it; None: unknown
    documents: int | None = None  # at most this many in all rows, each contiguous, padding on the right; None: unknown
    continues_cache: bool = False  # its tokens follow, in order, those that a cache holds
    coordinates: Tensor | None = None  # int [b, t, 3]: time, row and column, if a scheme reads them
    pages: Pages | None = None  # of keys in a paged cache that a kernel can read there; None: others, or a copy of them
    origins: Tensor | None = None  # int [b, t]: the row of a cache that holds each key; None: its own row
    whole: WholeRows | None = None  # the rows that these tokens are a part of; None: these are whole rows

    @classmethod
    def right_padded(cls, segments: Tensor) -> "Layout":
        """Return the layout of rows of one segment, 0, with padding (-1) on the right: causal layers need no mask."""
        rows, length = segments.shape
        index = torch.arange(length, device=segments.device)[None]
        return cls(index, segments, ordered=True, packed=False, padding="right", position_bound=length, documents=rows)

    @classmethod
    def packed_rows(cls, segments: Tensor, documents: int) -> "Layout":
        """Return the layout of rows of concatenated documents, at most `documents` in all, with padding on the right.

        In each row of a source and its target the documents are numbered from 0, alike in both.
        """
        positions, length = segment_positions(segments), segments.shape[1]
        return cls(positions, segments, ordered=True, position_bound=length, documents=documents)

    @property
    def is_arange(self) -> bool:
        """True if every row is one text at positions 0, 1, 2, ..., with padding, if any, on the right."""
        plain = self.ordered and not self.packed and self.padding != "any"
        return plain and self.position_bound == self.positions.shape[1]

    @property
    def facts(self) -> Facts:
        """Facts that the choice of a kernel needs."""
        return Facts(
            self.positions.shape[1],
            None if self.marks is None else True,
            self.segments is not None,
            self.ordered,
            self.packed,
            self.padding,
            self.ordered and self.is_arange,
            self.documents is not None,
        )

    @property
    def segment_ids(self) -> Tensor:
        """The segment of every token, int [b or 1, t]: zeros where `segments` is None."""
        return torch.zeros_like(self.positions) if self.segments is None else self.segments

    def checked(self, batch: int, length: int) -> "Layout":
        """Return this layout; raise a ValueError if its shapes do not fit [batch, length] tokens."""
        check(batch, length, positions=self.positions, segments=self.segments, marks=self.marks)
        return self


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
HINT = (
    "the number of each token's document, -1 for padding; give a mask of the real tokens as `attention_mask`, "
    "or as torch.where(mask == 1, 0, -1)"
)
MASKS = ("marks", "attention_mask")  # facts for which a boolean is a valid value, 0 or 1


def check(batch: int, length: int, **facts: Tensor | None) -> None:
    """Raise a ValueError if facts about [batch, length] tokens have another shape or are not integers."""
    for name, x in facts.items():
        if x is None:
            continue
        if x.dim() != 2 or x.shape[0] not in (1, batch) or x.shape[1] != length:
            raise ValueError(f"{name} has shape {list(x.shape)}, expected [{batch}, {length}] like the tokens")
        if x.dtype not in INTEGERS and (name not in MASKS or x.dtype not in (torch.bool, torch.uint8)):
            hint = f": {HINT}" if name == "segments" else ""
            raise ValueError(f"{name} must be integers, got {x.dtype}{hint}")


def check_values(segments: Tensor | None, attention_mask: Tensor | None, whole: bool = True) -> None:
    """Raise a ValueError if a mask is not of zeros and ones, or if segments can only be a mask; [b, t] each.

    Segments 0 and 1 can only be a mask where a 0 follows a 1: documents would be in falling order. In `whole` rows they
    also are one if some rows are all ones and others begin with zeros: padding on the left, up to the longest row. Rows
    that all begin with zeros and end with ones are two documents. A device's values are not read: it would synchronise.
    """
    given = segments if attention_mask is None else attention_mask
    if given is None or given.device.type != "cpu" or torch.compiler.is_compiling():
        return
    low, high = int(given.min()), int(given.max())
    if attention_mask is not None:
        if low < 0 or high > 1:
            raise ValueError(f"attention_mask has a {low if low < 0 else high}: give 1 at real tokens, 0 at padding")
    elif (low, high) == (0, 1):
        lowest, falls = given.amin(dim=1), bool((given[:, 1:] < given[:, :-1]).any())
        if falls or (whole and bool((lowest == 1).any() & (lowest < given[:, -1]).any())):
            raise ValueError(f"segments are 1 and 0 as in a mask of the real tokens, expected {HINT}")


def choose_segments(
    batch: int, length: int, segments: Tensor | None, attention_mask: Tensor | None, newest: Tensor | None = None
) -> Tensor | None:
    """Return the segments of [batch, length] tokens, given as such or by a mask of the real ones (1).

    A mask's tokens are of the `newest` segment [b] in a cache, or of segment 0.
    """
    check(batch, length, segments=segments, attention_mask=attention_mask)
    if attention_mask is None:
        return segments
    if segments is not None:
        raise ValueError("attention_mask and segments both say which tokens are padding: leave one of them out")
    return torch.where(attention_mask == 1, 0 if newest is None else newest[:, None], PADDING)


def make_layout(
    batch: int,
    length: int,
    device: torch.device,
    *,
    segments: Tensor | None = None,
    attention_mask: Tensor | None = None,
    positions: Tensor | None = None,
    marks: Tensor | None = None,
) -> Layout:
    """Return the layout of [batch, length] tokens; by default positions count from 0 within each segment."""
    check(batch, length, positions=positions, marks=marks)
    segments = choose_segments(batch, length, segments, attention_mask)
    if segments is None and positions is None:
        index = torch.arange(length, device=device)[None]
        return Layout(index, None, marks, ordered=True, packed=False, padding="none", position_bound=length)
    if positions is None and segments is not None:
        return Layout(segment_positions(segments), segments, marks, ordered=True, position_bound=length)
    assert positions is not None
    packed = segments is not None
    return Layout(positions, segments, marks, packed=packed, padding="any" if packed else "none")


def real(segments: Tensor) -> Tensor:
    """Return which tokens are not padding."""
    return segments > PADDING


def segment_positions(segments: Tensor, last: Tensor | None = None, following: Tensor | None = None) -> Tensor:
    """Return positions from 0 within each run of equal segments, [b, t]; padding is at 0 and interrupts no run.

    A first run of segment `last` [b] continues from position `following` [b]: a cache holds the tokens before it.
    """
    is_real, new = real(segments), segment_starts(segments, last)
    rank = is_real.cumsum(dim=1) - 1  # padding does not count
    count = rank - torch.where(new, rank, 0).cummax(dim=1).values
    if following is not None:
        count = torch.where(new.cumsum(dim=1) == 0, following[:, None] + rank, count)
    return torch.where(is_real, count, 0)


def segment_starts(segments: Tensor, last: Tensor | None = None) -> Tensor:
    """Return which real tokens are in another segment than the real token before them, bool [b, t].

    Before the first one there is a token of segment `last` [b], or none.
    """
    is_real = real(segments)
    index = torch.arange(segments.shape[1], device=segments.device)[None]
    newest = torch.where(is_real, index, -1).cummax(dim=1).values  # the real token at or before each index
    newest = torch.cat((torch.full_like(newest[:, :1], -1), newest[:, :-1]), dim=1)  # strictly before it
    first = PADDING if last is None else last[:, None]
    return is_real & (segments != torch.where(newest < 0, first, segments.gather(1, newest.clamp(min=0))))


def sees(pattern: Pattern, q: Layout, k: Layout) -> Tensor:
    """Return which keys each query sees, bool [b or 1, t, s]: the definition that all kernels share."""
    seen = pattern.sees(q.positions[:, :, None], k.positions[:, None, :])
    if k.marks is not None:
        seen = seen | (k.marks >= SEEN)[:, None, :]
    if q.marks is not None:
        seen = seen | (q.marks >= SEER)[:, :, None]
    if q.marks is not None and k.marks is not None:
        seen = seen | ((q.marks[:, :, None] == k.marks[:, None, :]) & (k.marks < PLAIN)[:, None, :])
    if q.segments is None and k.segments is None:
        return seen
    q_segments = 0 if q.segments is None else q.segments[:, :, None]
    k_segments = 0 if k.segments is None else k.segments[:, None, :]
    return seen & (q_segments == k_segments)
