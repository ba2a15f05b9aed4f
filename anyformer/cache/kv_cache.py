"""The key/value cache: an object outside the model, zero-filled, with fixed addresses and static shapes.

Slots are filled in order of arrival; positions and segments say what stands in a slot, so ragged rows, pads and dropped
tokens need no special case: whoever reads the cache sees only slots of its own segment. Layers that look back a bounded
way keep a ring of so many tokens (`ring.py`), and attention may keep its numbers as int8. All state is tensors, so a
decode step compiles once.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from anyformer.attention.layout import Layout, check, real, segment_positions
from anyformer.cache.ring import Ring, Slots, SlotWriter, Step
from anyformer.conventions import PADDING, SEER
from anyformer.kernels.reorder_rows import can_reorder_in_groups, reorder_in_groups
from anyformer.kernels.runtime import at_least_fp32

CacheKind = Literal["auto", "static", "int8"]
"""auto: rings where a window allows it; static: every layer keeps every token; int8: auto, with numbers of 8 bits."""


class Sizes(NamedTuple):
    """What one layer keeps of each token: key/value heads and their widths."""

    groups: int
    key_width: int
    value_width: int
    reach: int | None = None  # of how many tokens back; None: of all
    rounds: bool = False  # may be kept as int8


class Exact:
    """Vectors [b, g, slots, k] as they came."""

    def __init__(self, batch: int, groups: int, slots: int, width: int, device: torch.device, dtype: torch.dtype):
        self.numbers = torch.zeros(batch, groups, slots, width, device=device, dtype=dtype)

    def write(self, new: Tensor, place: SlotWriter) -> Tensor:
        """Puts new vectors in their place and returns all that can be read."""
        return place.write(self.numbers, new.to(self.numbers.dtype))

    def read(self) -> Tensor:
        """What is there already."""
        return self.numbers

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.numbers,)


class Int8(Exact):
    """Vectors as whole numbers from -127 to 127 times a scale of their own: an error of at most max|x| / 254."""

    def __init__(self, batch: int, groups: int, slots: int, width: int, device: torch.device, dtype: torch.dtype):
        super().__init__(batch, groups, slots, width, device, torch.int8)
        self.scales = torch.zeros(batch, groups, slots, 1, device=device, dtype=dtype)

    def write(self, new: Tensor, place: SlotWriter) -> Tensor:
        new, tiny = at_least_fp32(new), torch.finfo(self.scales.dtype).tiny
        scale = (new.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=tiny).to(self.scales.dtype)
        numbers = super().write((new / scale).round(), place)
        return numbers.to(scale.dtype) * place.write(self.scales, scale)

    def read(self) -> Tensor:
        return self.numbers.to(self.scales.dtype) * self.scales

    def tensors(self) -> tuple[Tensor, ...]:
        return self.numbers, self.scales


class LayerCache:
    """The keys and values of one layer (of one application, where layers share weights)."""

    def __init__(
        self, batch: int, slots: int, sizes: Sizes, device: torch.device, dtype: torch.dtype, int8: bool = False
    ):
        self.keys, self.values = (
            (Int8 if int8 and sizes.rounds and width else Exact)(batch, sizes.groups, slots, width, device, dtype)
            for width in (sizes.key_width, sizes.value_width)
        )
        self.cross: tuple[Tensor, Tensor] | None = None  # cross-attention: written once, read ever after

    def append(self, k: Tensor, v: Tensor, place: SlotWriter) -> tuple[Tensor, Tensor]:
        """Writes new keys and values [b, g, t, k] in their place and returns all that can be read [b, g, s, k]."""
        return self.keys.write(k, place), self.values.write(v, place)

    def keep_cross(self, k: Tensor, v: Tensor) -> None:
        """Remembers what cross-attention reads of the source."""
        old = self.cross or (None, None)
        self.cross = copy_into(old[0], k), copy_into(old[1], v)

    def own(self) -> tuple[Tensor, ...]:
        """What is kept of the tokens that were read."""
        return *self.keys.tensors(), *self.values.tensors()

    def tensors(self) -> tuple[Tensor, ...]:
        return *self.own(), *(self.cross or ())


def copy_into(old: Tensor | None, new: Tensor) -> Tensor:
    """A copy, where an old one of the same shape is."""
    if old is None or old.shape != new.shape or old.dtype != new.dtype:
        return new.clone(memory_format=torch.contiguous_format)
    return old.copy_(new)


class Cache:
    """What a decoder has read so far. Made by `model.new_cache`."""

    def __init__(
        self,
        batch: int,
        slots: int,
        sizes: tuple[Sizes, ...],
        device: torch.device,
        dtype: torch.dtype,
        kind: CacheKind = "auto",
        slack: int = 0,
    ):
        if kind not in ("auto", "static", "int8"):
            raise ValueError(f"kind = {kind!r}: must be 'auto', 'static' or 'int8'")
        if slack < 0:
            raise ValueError(f"slack = {slack}: must not be negative")
        reaches = {size.reach for size in sizes if size.reach is not None and kind != "static"}
        rings = [Ring(batch, reach, slack, device) for reach in sorted(reaches)]
        self.rings = {ring.reach: ring for ring in rings if ring.slots < slots}  # worth it where it is smaller
        self.layers = [
            LayerCache(batch, self._room(size, slots), size, device, dtype, kind == "int8") for size in sizes
        ]
        self.slots, self.sizes, self.taken = slots, sizes, 0
        self.length = torch.zeros((), dtype=torch.long, device=device)  # slots taken, where the device knows it
        self.everywhere = torch.full_like(self.length, 2**31)  # a length beyond all slots
        self.positions = torch.zeros(batch, slots, dtype=torch.long, device=device)
        self.segments = torch.full((batch, slots), PADDING, dtype=torch.long, device=device)
        self.marks: Tensor | None = None  # of what was read first, where it was marked; all else is plain
        self.segment = torch.zeros(batch, dtype=torch.long, device=device)  # of each row's newest real token
        self.following = torch.zeros(batch, dtype=torch.long, device=device)  # the position after it
        self.source: Layout | None = None  # where the encoder's tokens stand
        self.states: Tensor | None = None  # after each of them, of the layers whose states the decoder begins with

    def _room(self, size: Sizes, slots: int) -> int:
        return slots if size.reach is None or size.reach not in self.rings else self.rings[size.reach].slots

    def make_layout(
        self,
        batch: int,
        length: int,
        segments: Tensor | None,
        positions: Tensor | None,
        marks: Tensor | None = None,
    ) -> Layout:
        """The layout of new tokens; what is not given goes on from what the cache holds."""
        if batch != self.segment.shape[0]:
            raise ValueError(f"the cache was made for a batch of {self.segment.shape[0]}, got {batch}")
        check(batch, length, segments=segments, positions=positions, marks=marks)
        if marks is not None:
            self._check_marks(marks)
        if segments is None and positions is None and marks is None:
            return self.next(length)
        segments, positions, marks = (None if x is None else x.long() for x in (segments, positions, marks))
        segments = (self.segment[:, None] if segments is None else segments).expand(batch, length)
        position_bound = None
        if positions is None:
            positions = segment_positions(segments, self.segment, self.following)
            position_bound = None if self.taken else length
        marks = None if marks is None else marks.expand(batch, length)
        return Layout(positions.expand(batch, length), segments, marks, position_bound=position_bound)

    def _check_marks(self, marks: Tensor) -> None:
        """Whoever sees a marked token must not have been read before it."""
        if self.taken:
            raise ValueError("only the first tokens that a cache reads may be marked: those before would see them")
        if self.rings:
            raise ValueError("a marked token is seen from beyond a window: make a cache of kind 'static'")
        if bool((marks >= SEER).any()):
            raise ValueError("a token that sees its whole segment sees tokens that are not read yet: it takes no cache")

    def next(self, length: int, there: Tensor | None = None, position_bound: int | None = None) -> Layout:
        """The layout of so many tokens that go on from what each row holds, those that are `there`, bool [b, length];
        `bound`: what their positions are known to be below."""
        if there is None:
            index = torch.arange(length, device=self.length.device)
            segments = self.segment[:, None].expand(-1, length)
            return Layout(
                self.following[:, None] + index, segments, position_bound=position_bound, continues_cache=True
            )
        positions = torch.where(there, self.following[:, None] + there.cumsum(dim=1) - 1, 0)
        return Layout(
            positions,
            torch.where(there, self.segment[:, None], PADDING),
            position_bound=position_bound,
            continues_cache=True,
        )

    def reserve(self, length: int) -> None:
        """Counts slots on the host, so that no device is asked. `take` does it where Python runs at each step; whoever
        runs a compiled step, or replays one, does it beforehand."""
        if self.taken + length > self.slots:
            raise ValueError(f"the cache has {self.slots} slots, {self.taken} taken: {length} more do not fit")
        self.taken += length

    def skip(self, length: int) -> None:
        """Takes slots that were filled from outside (`snapshot.py`)."""
        self.reserve(length)
        self.length += length

    def take(self, new: Layout) -> dict[int | None, Step]:
        """Makes room for new tokens; by the reach of a ring, or None: what its layers read, and where they write."""
        assert new.segments is not None
        length = new.segments.shape[1]
        if not torch.compiler.is_compiling() and not (self.length.is_cuda and torch.cuda.is_current_stream_capturing()):
            if self.rings and not new.continues_cache and not self._in_order(new.positions, new.segments):
                raise ValueError(
                    "with a window's ring tokens come in order: segments, and positions within them, must grow; "
                    "a cache of kind 'static' takes them in any order"
                )
            self.reserve(length)
        at = self.length + torch.arange(length, device=self.length.device)
        self.positions.index_copy_(1, at, new.positions)
        self.segments.index_copy_(1, at, new.segments)
        if new.marks is not None and self.marks is None:
            self.marks = torch.zeros_like(self.positions)
        if self.marks is not None:
            self.marks.index_copy_(1, at, torch.zeros_like(new.segments) if new.marks is None else new.marks)
        self.length += length
        self._settle(new.positions, new.segments)
        steps: dict[int | None, Step] = {None: Step(Layout(self.positions, self.segments, self.marks), Slots(at))}
        return steps | {reach: ring.take(new) for reach, ring in self.rings.items()}

    def _in_order(self, positions: Tensor, segments: Tensor) -> bool:
        """Whether every real token stands after the one before it."""
        is_real = real(segments)
        index = torch.arange(1, segments.shape[1] + 1, device=segments.device)
        newest = torch.where(is_real, index, 0).cummax(dim=1).values
        before = torch.cat((torch.zeros_like(newest[:, :1]), newest[:, :-1]), dim=1)  # 0: what the cache holds
        segment = torch.cat((self.segment[:, None], segments), dim=1).gather(1, before)
        position = torch.cat((self.following[:, None] - 1, positions), dim=1).gather(1, before)
        after = (segments > segment) | ((segments == segment) & (positions > position))
        return bool((after | ~is_real).all())

    def _settle(self, positions: Tensor, segments: Tensor) -> None:
        """Finds each row's newest real token among some; a row that has none there stays as it is."""
        index = torch.arange(segments.shape[1], device=segments.device)
        newest = torch.where(real(segments), index, -1).amax(dim=1, keepdim=True)
        found, newest = newest[:, 0] >= 0, newest.clamp(min=0)
        self.segment.copy_(torch.where(found, segments.gather(1, newest)[:, 0], self.segment))
        self.following.copy_(torch.where(found, positions.gather(1, newest)[:, 0] + 1, self.following))

    def keep_source(self, source: Layout, states: Tensor | None = None) -> None:
        """Remembers where the encoder's tokens stand, and their states: copies, since `reorder` writes to them."""
        old = (None, None) if self.source is None else self.source[:2]
        self.states = None if states is None else copy_into(self.states, states)
        segments = None if source.segments is None else copy_into(old[1], source.segments)
        self.source = source._replace(positions=copy_into(old[0], source.positions), segments=segments)

    def reset(self) -> None:
        """Empty again, at the same addresses; what is known of a source stays until another is there."""
        torch._foreach_zero_([x for layer in self.layers for x in layer.own()])  # what is spoilt would stay so
        for x in (self.length, self.positions, self.segment, self.following):
            x.zero_()
        self.segments.fill_(PADDING)
        self.marks, self.taken = None, 0
        for ring in self.rings.values():
            ring.reset()

    def fill(self, other: "Cache", copies: int) -> None:
        """Takes over what another cache with as many slots holds: each of its rows so many times, side by side."""

        def copied(x: Tensor) -> Tensor:
            return x if x.shape[0] != len(other.segment) else x.repeat_interleave(copies, dim=0)

        for mine, theirs in zip(self._state(), other._state(), strict=True):
            mine.unflatten(0, (len(theirs), copies)).copy_(theirs[:, None])
        for layer, its in zip(self.layers, other.layers, strict=True):
            if its.cross is not None:
                layer.keep_cross(*map(copied, its.cross))
        if (source := other.source) is not None:
            segments = None if source.segments is None else copied(source.segments)
            states = None if other.states is None else copied(other.states)
            self.keep_source(source._replace(positions=copied(source.positions), segments=segments), states)
        self.marks = None if other.marks is None else copied(other.marks)
        self.length.copy_(other.length)
        self.taken = other.taken

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` slots; a ring can take back only what its slack allows."""
        if not 0 <= length <= self.slots:
            raise ValueError(f"length = {length}: must be from 0 to {self.slots}")
        left = real(self.segments[:, :length]).sum(dim=1)
        for ring in self.rings.values():
            ring.check(left)
        for ring in self.rings.values():
            ring.truncate(left)
        self.length.clamp_(max=length)
        self.taken = min(self.taken, length)
        self.segments[:, length:] = PADDING
        self._settle_anew()

    def _settle_anew(self) -> None:
        self.segment.zero_()
        self.following.zero_()
        self._settle(self.positions, self.segments)

    def forget(self, n: Tensor) -> None:
        """Takes back the newest `n` [b] real tokens of each row, of a ring no more than its slack allows. Where rows
        differ in it, slots are left empty."""
        is_real = real(self.segments)
        left = is_real.sum(dim=1) - n
        for ring in self.rings.values():
            ring.check(left)
        for ring in self.rings.values():
            ring.truncate(left)
        self.segments.masked_fill_(is_real & (is_real.cumsum(dim=1) > left[:, None]), PADDING)
        self._settle_anew()

    def compact(self, first: int) -> Tensor:
        """Closes the gaps between real tokens from slot `first` on, so that the slots behind are free again: the order
        [b, slots] in which old slots stand now."""
        index = torch.arange(self.slots, device=self.length.device)
        order = torch.where((index < first) | real(self.segments), index, index + self.slots).argsort(dim=1)
        for facts in self._facts():
            facts.copy_(facts.gather(1, order))
        for layer in self.layers:
            for x in (*layer.keys.tensors(), *layer.values.tensors()):
                if x.shape[2] == self.slots:  # a ring has fewer, and no gaps
                    x.copy_(x.gather(2, order[:, None, :, None].expand_as(x)))
        newest = torch.where(real(self.segments), index + 1, first).amax()
        self.length.copy_(newest)
        self.taken = int(newest)
        return order

    def _facts(self) -> list[Tensor]:
        """What is known of each slot [b, slots]."""
        return [x for x in (self.positions, self.segments, self.marks) if x is not None]

    def _state(self) -> list[Tensor]:
        """What belongs to each row [b, ...], apart from its source."""
        state = [self.positions, self.segments, self.segment, self.following]
        state += [x for ring in self.rings.values() for x in ring.tensors()]
        return state + [x for layer in self.layers for x in layer.own()]

    def reorder(self, rows: Tensor, *, group_size: int | None = None) -> None:
        """Row i becomes what row `rows[i]` was (beam search): any, or one of the `within` neighbours that answer the
        same source."""
        if rows.shape != self.segment.shape:
            raise ValueError(f"rows has shape {list(rows.shape)}, expected {list(self.segment.shape)} like the batch")
        state = self._state()
        if self.marks is not None:
            state.append(self.marks)
        if group_size is None:
            state += [x for layer in self.layers for x in layer.cross or ()]
            if self.states is not None:
                state.append(self.states)
            if self.source is not None:
                state += [x for x in self.source[:3] if x is not None and x.shape[0] == rows.shape[0]]
        else:
            for x in [x for x in state if can_reorder_in_groups(x, group_size)]:
                full = x.shape[2] == self.slots  # else a ring, which fills in another order, or a state
                reorder_in_groups(x, rows, self.length if full else self.everywhere, group_size)
            state = [x for x in state if not can_reorder_in_groups(x, group_size)]
        for x in state:
            x = x[:, :, : self.taken] if self._counted(x) else x
            x.copy_(x.index_select(0, rows))

    def _counted(self, x: Tensor) -> bool:
        """Whether the host knows which slots of it are empty."""
        return x.dim() == 4 and x.shape[2] == self.slots and x.device.type == "cpu"

    def nbytes(self) -> int:
        """Bytes of keys and values, cross-attention's and the encoder's states included."""
        kept = [x for layer in self.layers for x in layer.tensors()]
        return sum(x.nbytes for x in kept) + (0 if self.states is None else self.states.nbytes)
