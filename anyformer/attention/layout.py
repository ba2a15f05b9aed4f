"""Who sees whom: facts about positions, segments and marks, never about indices (see `docs/masks.md`).

Every token carries a position, a segment and a mark. A query sees a key when their segments are equal and

    the pattern allows it, pattern.sees(q_position, k_position), or
    the key is marked SEEN (a prefix: its whole segment sees it), or
    the query is marked SEER (a global token: it also sees its whole segment).

Padding is segment -1, packed documents are different segments, an empty cache slot is segment -1. So training,
packing, left and right padding, chunked prefill and decoding are one code path, and a pad attends to pads: no row is
empty in self-attention. Facts that spare a mask are Python values set where the layout is made; nothing here reads a
tensor on the host.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from anyformer.config import Causal, Full, Pattern, Rotation, Scheme
from anyformer.conventions import PADDING, SEEN, SEER

if TYPE_CHECKING:
    from anyformer.attention.flex import Blocks
    from anyformer.attention.varlen import Documents


class Layout(NamedTuple):
    """Where the tokens of a batch stand."""

    positions: Tensor  # int [b or 1, t]
    segments: Tensor | None = None  # int [b, t]; None: one segment, every token real
    marks: Tensor | None = None  # int [b, t]; None: all plain
    ordered: bool = False  # positions grow with the index within each segment
    packed: bool = True  # a row may hold several segments
    padding: Literal["none", "right", "any"] = "any"
    position_bound: int | None = None  # all positions are below it, where that is known without looking
    documents: int | None = None  # at most so many in all rows, each in one run, all pads to the right; None: unknown
    continues_cache: bool = False  # goes on, in order, from what a cache holds

    @classmethod
    def right_padded(cls, segments: Tensor) -> "Layout":
        """Rows of one segment each, 0, with all padding (-1) on the right: causal layers then need no mask."""
        rows, length = segments.shape
        index = torch.arange(length, device=segments.device)[None]
        return cls(index, segments, ordered=True, packed=False, padding="right", position_bound=length, documents=rows)

    @classmethod
    def packed_rows(cls, segments: Tensor, documents: int) -> "Layout":
        """Rows of one document after the other, at most `documents` in all of them, with all padding (-1) on the right.
        Of a source and a target, row by row, documents are numbered from 0, alike in both."""
        return cls(
            segment_positions(segments), segments, ordered=True, position_bound=segments.shape[1], documents=documents
        )

    @property
    def is_arange(self) -> bool:
        """Whether every row is one text at positions 0, 1, 2, ..., with pads, if any, on its right."""
        return (
            self.ordered
            and not self.packed
            and self.padding != "any"
            and self.position_bound == self.positions.shape[1]
        )

    def checked(self, batch: int, length: int) -> "Layout":
        """Itself, or a clear error where its shapes do not fit the tokens."""
        check(batch, length, positions=self.positions, segments=self.segments, marks=self.marks)
        return self


WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
EXPECTED = {
    "segments": "the number of each token's document, -1 for padding; for a mask of the real tokens, "
    "give torch.where(mask, 0, -1)"
}


def check(batch: int, length: int, **facts: Tensor | None) -> None:
    """Raise a clear error where facts about [batch, length] tokens have another shape, or are not whole numbers."""
    for name, x in facts.items():
        if x is None:
            continue
        if x.dim() != 2 or x.shape[0] not in (1, batch) or x.shape[1] != length:
            raise ValueError(f"{name} has shape {list(x.shape)}, expected [{batch}, {length}] like the tokens")
        # marks are 0 or 1 for most, so that a mask means the same; as segments it would number documents
        if x.dtype not in WHOLE and (name != "marks" or x.dtype not in (torch.bool, torch.uint8)):
            what = f": {EXPECTED[name]}" if name in EXPECTED else ""
            raise ValueError(f"{name} must be whole numbers, got {x.dtype}{what}")


def make_layout(
    batch: int,
    length: int,
    device: torch.device,
    *,
    segments: Tensor | None = None,
    positions: Tensor | None = None,
    marks: Tensor | None = None,
) -> Layout:
    """The layout of [batch, length] tokens; positions not given count from 0 within each segment."""
    check(batch, length, segments=segments, positions=positions, marks=marks)
    if segments is None and positions is None:
        index = torch.arange(length, device=device)[None]
        return Layout(index, None, marks, ordered=True, packed=False, padding="none", position_bound=length)
    if positions is None and segments is not None:
        return Layout(segment_positions(segments), segments, marks, ordered=True, position_bound=length)
    assert positions is not None
    packed = segments is not None
    return Layout(positions, segments, marks, packed=packed, padding="any" if packed else "none")


def real(segments: Tensor) -> Tensor:
    """Which tokens are not padding."""
    return segments > PADDING


def segment_positions(segments: Tensor, last: Tensor | None = None, following: Tensor | None = None) -> Tensor:
    """Positions from 0 within each run of equal segments, [b, t]; pads are all at 0 and interrupt no run.

    A first run of segment `last` [b] goes on from position `following` [b] (what a cache already holds).
    """
    is_real = real(segments)
    index = torch.arange(segments.shape[1], device=segments.device)[None]
    newest = torch.where(is_real, index, -1).cummax(dim=1).values  # the real token at or before each place
    newest = torch.cat((torch.full_like(newest[:, :1], -1), newest[:, :-1]), dim=1)  # strictly before it
    first = PADDING if last is None else last[:, None]
    new = is_real & (segments != torch.where(newest < 0, first, segments.gather(1, newest.clamp(min=0))))
    rank = is_real.cumsum(dim=1) - 1  # pads do not count
    count = rank - torch.where(new, rank, 0).cummax(dim=1).values
    if following is not None:
        count = torch.where(new.cumsum(dim=1) == 0, following[:, None] + rank, count)
    return torch.where(is_real, count, 0)


def sees(pattern: Pattern, q: Layout, k: Layout) -> Tensor:
    """The definition: bool [b or 1, t, s]."""
    seen = pattern.sees(q.positions[:, :, None], k.positions[:, None, :])
    if k.marks is not None:
        seen = seen | (k.marks >= SEEN)[:, None, :]
    if q.marks is not None:
        seen = seen | (q.marks >= SEER)[:, :, None]
    if q.segments is not None or k.segments is not None:
        seen = seen & (_segments(q)[:, :, None] == _segments(k)[:, None, :])
    return seen


def _segments(layout: Layout) -> Tensor:
    return torch.zeros_like(layout.positions) if layout.segments is None else layout.segments


class Relation(NamedTuple):
    """Mask and positions between queries and keys, lowered once per forward pass for all layers that share them."""

    causal: bool = False  # the kernels' own causal flag says it all
    mask: Tensor | None = None  # bool [b or 1, 1, t, s]; None: every key, or as `causal` says
    bias: Tensor | None = None  # added to the scores [b or 1, h, t, s], -inf where masked
    alive: Tensor | None = None  # bool [b, 1, t, 1]: rows that see any key; None: all do
    rotation: Rotation | None = None
    scheme: Scheme | None = None
    blocks: "Blocks | None" = None  # for `flex`, and then nothing of t·s is here
    documents: "Documents | None" = None  # for `varlen`, likewise
    few: bool = False  # for `decode`, beside mask and bias
    make: "Callable[[], Relation] | None" = None  # the dense form of such a relation, on demand

    def dense(self) -> "Relation":
        """The same with mask and bias at hand."""
        return self if self.make is None else self.make()


Role = Literal["self", "cached", "cross"]  # keys: the same tokens; a cache that holds them too; another sequence


def without_mask(pattern: Pattern, q: Layout, k: Layout, role: Role) -> Relation | None:
    """The relation by which kernels need no mask, where layouts and pattern allow one."""
    if q.marks is None and k.marks is None and not q.packed and not k.packed:
        if isinstance(pattern, Full) and q.padding == k.padding == "none":
            return Relation()
        # the real tokens of a row never see the pads to their right
        if isinstance(pattern, Causal) and role == "self" and q.ordered and q.padding != "any":
            return Relation(causal=True)
    return None


def lower_dense(pattern: Pattern, q: Layout, k: Layout, role: Role, bias: Tensor | None = None) -> Relation:
    """Lowers a pattern between two layouts to a mask, or to less."""
    if bias is None and (spared := without_mask(pattern, q, k, role)) is not None:
        return spared
    mask, alive = sees(pattern, q, k)[:, None], None
    if role == "cross" or not pattern.sees_self:  # a row may see nothing: let it see all, and zero it afterwards
        alive = mask.any(dim=-1, keepdim=True)
        mask = mask | ~alive
    if bias is not None:
        return Relation(bias=bias.masked_fill(~mask, -torch.inf), alive=alive)
    return Relation(mask=mask, alive=alive)
