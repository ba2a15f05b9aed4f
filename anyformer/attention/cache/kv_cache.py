"""KV cache: an object outside the model, zero-filled, with fixed addresses and static shapes.

Slots are filled in order of arrival, and each has a position and a segment. So ragged rows, padding and removed tokens
need no special case: a query sees only slots of its segment. Layers with a causal window store the window alone, in a
ring (`ring.py`), and attention can store int8 (`layer_cache.py`). A decode step compiles once.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from anyformer.attention.cache.layer_cache import LayerCache, copy_into
from anyformer.attention.cache.ring import FirstTokens, Ring, RowSlots, SharedSlots, Slots, Step
from anyformer.attention.cache.states import StateCache
from anyformer.attention.layout import Layout, check, choose_segments, real, segment_positions
from anyformer.config.cost import Sizes, StateSizes
from anyformer.kernels.conventions import PADDING, SEEN, SEER
from anyformer.kernels.paged import can_reorder_in_groups, reorder_in_groups
from anyformer.kernels.private import zero_all

CacheKind = Literal["auto", "static", "int8", "none"]
"""auto: rings for windows; static: all tokens; int8: auto, with 8-bit values; none: inputs alone, to be read again."""


class Cache:
    """State of a decoder after the tokens read so far. Made by `model.new_cache`."""

    def __init__(
        self,
        batch: int,
        slots: int,
        sizes: tuple[Sizes | StateSizes, ...],
        device: torch.device,
        dtype: torch.dtype,
        kind: CacheKind = "auto",
        slack: int = 0,
    ):
        if kind not in get_args(CacheKind):
            raise ValueError(f"kind = {kind!r}: must be 'auto', 'static', 'int8' or 'none'")
        if slack < 0:
            raise ValueError(f"slack = {slack}: must not be negative")
        rings = [Ring(batch, n, slack, device) for n in sorted({s.reach for s in sizes if s.reach is not None})]
        self.rings = {ring.reach: ring for ring in rings if kind != "static" and ring.slots < slots}  # smaller ones
        self.layers: list[LayerCache | StateCache] = [
            StateCache(batch, size, device, dtype, slack)
            if isinstance(size, StateSizes)
            else LayerCache(batch, self._slots_of(size, slots), size, device, dtype, kind == "int8")
            for size in sizes
        ]
        self.slots, self.sizes, self.taken, self.recomputes = slots, sizes, 0, kind == "none"
        self.fresh = True  # no token was read yet: the first ones read each other, without a mask of empty slots
        self.length = torch.zeros((), dtype=torch.long, device=device)  # `taken` as a tensor
        self.everywhere = torch.full_like(self.length, 2**31)  # longer than any cache
        self.positions = torch.zeros(batch, slots, dtype=torch.long, device=device)
        self.segments = torch.full((batch, slots), PADDING, dtype=torch.long, device=device)
        self.marks: Tensor | None = None  # int [b, slots], if the first tokens were marked
        self.segment = torch.zeros(batch, dtype=torch.long, device=device)  # of each row's newest real token
        self.following = torch.zeros(batch, dtype=torch.long, device=device)  # position after it
        self.by_row = False  # each row has separate slots (`split_rows`)
        self.row_length = torch.zeros_like(self.following)  # then: the next slot of each row
        self.origins: Tensor | None = None  # int [b, slots]: the row that holds each token (`share_rows`)
        self.source: Layout | None = None  # layout of the encoder's tokens
        self.states: Tensor | None = None  # recurrent encoder states from which decoder layers start [b, s, h]

    def _slots_of(self, size: Sizes, slots: int) -> int:
        return slots if size.reach is None or size.reach not in self.rings else self.rings[size.reach].slots

    def make_layout(
        self,
        batch: int,
        length: int,
        segments: Tensor | None,
        positions: Tensor | None,
        marks: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Layout:
        """Return the layout of new tokens; by default they continue the newest segment of each row."""
        if batch != self.segment.shape[0]:
            raise ValueError(f"the cache was made for a batch of {self.segment.shape[0]}, got {batch}")
        check(batch, length, positions=positions, marks=marks)
        segments = choose_segments(batch, length, segments, attention_mask, self.segment)
        if marks is not None:
            self._check_marks(marks)
        if segments is None and positions is None and marks is None:
            return self.next(length)
        segments, positions, marks = (None if x is None else x.long() for x in (segments, positions, marks))
        segments = (self.segment[:, None] if segments is None else segments).expand(batch, length)
        position_bound, ordered = None, False
        if positions is None:
            positions = segment_positions(segments, self.segment, self.following)
            position_bound, ordered = (length, True) if self.fresh else (None, False)
        marks = None if marks is None else marks.expand(batch, length)
        positions = positions.expand(batch, length)
        return Layout(positions, segments, marks, ordered=ordered, position_bound=position_bound)

    def _check_marks(self, marks: Tensor) -> None:
        """Refuse marks that earlier tokens would have seen."""
        if self.taken and bool((marks >= SEEN).any()):
            raise ValueError("only the first tokens that a cache reads may be marked: earlier ones would see them")
        if self.rings:
            raise ValueError("a marked token is visible outside its window: use a cache of kind 'static'")
        if bool((marks >= SEER).any()):
            raise ValueError(
                "a token that sees its whole segment sees tokens that are not read yet: call the model without a cache"
            )

    def next(self, length: int, is_token: Tensor | None = None, position_bound: int | None = None) -> Layout:
        """Return the layout of `length` new tokens that continue each row.

        `is_token`, bool [b, length], is False for gaps. All positions are below `position_bound`.
        """
        if is_token is None:
            segments = self.segment[:, None].expand(-1, length)
            if self.fresh:
                return Layout.right_padded(segments)._replace(padding="none", continues_cache=True)
            index = torch.arange(length, device=self.length.device)
            return Layout(
                self.following[:, None] + index, segments, position_bound=position_bound, continues_cache=True
            )
        positions = torch.where(is_token, self.following[:, None] + is_token.cumsum(dim=1) - 1, 0)
        return Layout(
            positions,
            torch.where(is_token, self.segment[:, None], PADDING),
            position_bound=position_bound,
            continues_cache=True,
        )

    def reserve(self, length: int) -> None:
        """Count slots on the host, without a device synchronisation.

        `take` does so in eager mode; before a compiled or replayed step the caller does.
        """
        if self.taken + length > self.slots:
            raise ValueError(f"the cache has {self.slots} slots, {self.taken} in use: {length} more do not fit")
        self.taken += length

    def skip(self, length: int) -> None:
        """Count slots that were filled from outside (`snapshot.py`)."""
        self.reserve(length)
        self.length += length
        self.fresh = False

    def take(self, new: Layout) -> dict[int | None, Step]:
        """Allocate slots for new tokens; return what layers read and where they write, by the reach of their ring.

        The first tokens of a cache read each other, by the kernel that an uncached call would take.
        """
        assert new.segments is not None
        length, first = new.segments.shape[1], self.fresh
        if self.on_host():
            if self.rings and not new.continues_cache and not self._in_order(new.positions, new.segments):
                raise ValueError(
                    "a ring needs tokens in order: segments, and positions within them, must increase; "
                    "use a cache of kind 'static' for any other order"
                )
            if not self.by_row:
                self.reserve(length)
        writer, positions = self._writer(new.segments), new.positions.expand_as(new.segments)
        facts = [(self.positions, positions), (self.segments, new.segments)]
        if new.marks is not None and self.marks is None:
            self.marks = torch.zeros_like(self.positions)
        if self.marks is not None:
            facts.append((self.marks, torch.zeros_like(new.segments) if new.marks is None else new.marks))
        for stored, some in facts:
            if isinstance(writer, RowSlots):
                stored.scatter_(1, writer.at, some)
            else:
                stored.index_copy_(1, writer.at, some)
        if self.by_row:
            self.row_length += real(new.segments).sum(dim=1)
        else:
            self.length += length
        self._update_newest(positions, new.segments)
        own = Step(Layout(self.positions, self.segments, self.marks, origins=self.origins), writer)
        if first:
            own, self.fresh = Step(new, FirstTokens(writer)), False
        steps: dict[int | None, Step] = {None: own}
        return steps | {reach: ring.take(new, first) for reach, ring in self.rings.items()} if self.rings else steps

    def on_host(self) -> bool:
        """Return whether Python runs for every call: checks and counts have no effect in a compiled or captured one."""
        return not torch.compiler.is_compiling() and not (
            self.length.is_cuda and torch.cuda.is_current_stream_capturing()
        )

    def _writer(self, segments: Tensor) -> Slots | RowSlots | SharedSlots:
        """Return the slots of new tokens with these segments [b, t]."""
        if self.by_row:
            return RowSlots(self.slots_of(real(segments)))
        at = self.length + torch.arange(segments.shape[1], device=self.length.device)
        if self.origins is None:
            return Slots(at)
        rows = torch.arange(len(segments), device=at.device)[:, None]
        self.origins.index_copy_(1, at, rows.expand_as(segments))
        return SharedSlots(at, self.origins)

    def share_rows(self) -> None:
        """Let `reorder` move no keys and values from here on: rows read each other's, by a table of origins.

        Rows that `fill` copies from one prompt also read its source in one place.
        """
        assert not self.by_row
        self.origins = torch.zeros_like(self.positions)
        self._read_own_rows()

    def _read_own_rows(self) -> None:
        if self.origins is not None:
            self.origins.copy_(torch.arange(len(self.origins), device=self.origins.device)[:, None])

    def split_rows(self) -> None:
        """Give each row separate slots from here on: those of removed tokens are written again, without gaps.

        Slots are not counted on the host any more: the caller makes sure that all tokens of a call fit, gaps included.
        """
        self.by_row = True
        self.row_length.copy_(self.length.expand_as(self.row_length))

    def slots_of(self, is_token: Tensor) -> Tensor:
        """Return the slots of the next tokens of split rows, int [b, t]; gaps follow the tokens, to be overwritten."""
        before = is_token.cumsum(dim=1)
        index = torch.arange(is_token.shape[1], device=before.device)
        return self.row_length[:, None] + torch.where(is_token, before - 1, before[:, -1:] + index - before)

    def _in_order(self, positions: Tensor, segments: Tensor) -> bool:
        """Return whether every real token follows the real token before it."""
        is_real = real(segments)
        index = torch.arange(1, segments.shape[1] + 1, device=segments.device)
        newest = torch.where(is_real, index, 0).cummax(dim=1).values
        before = torch.cat((torch.zeros_like(newest[:, :1]), newest[:, :-1]), dim=1)  # 0: the newest token in the cache
        segment = torch.cat((self.segment[:, None], segments), dim=1).gather(1, before)
        position = torch.cat((self.following[:, None] - 1, positions), dim=1).gather(1, before)
        after = (segments > segment) | ((segments == segment) & (positions > position))
        return bool((after | ~is_real).all())

    def _update_newest(self, positions: Tensor, segments: Tensor) -> None:
        """Update each row's newest real token from the given ones; rows without a real one do not change."""
        index = torch.arange(segments.shape[1], device=segments.device)
        newest = torch.where(real(segments), index, -1).amax(dim=1, keepdim=True)
        has_new, newest = newest[:, 0] >= 0, newest.clamp(min=0)
        self.segment.copy_(torch.where(has_new, segments.gather(1, newest)[:, 0], self.segment))
        self.following.copy_(torch.where(has_new, positions.gather(1, newest)[:, 0] + 1, self.following))

    def keep_source(self, source: Layout, states: Tensor | None = None) -> None:
        """Store copies of the source layout and the encoder states; copies, since `reorder` writes to them."""
        old = (None, None, None) if self.source is None else (*self.source[:2], self.source.origins)
        self.states = None if states is None else copy_into(self.states, states)
        segments = None if source.segments is None else copy_into(old[1], source.segments)
        origins = None if source.origins is None else copy_into(old[2], source.origins)
        positions = copy_into(old[0], source.positions)
        self.source = source._replace(positions=positions, segments=segments, origins=origins)

    def reset(self) -> None:
        """Empty the cache at the same addresses; the source stays until another replaces it."""
        zero_all([x for layer in self.layers for x in layer.own()])  # NaN in an unused slot would spread
        for state in self._recurrent():
            state.reset()
        for x in (self.length, self.positions, self.segment, self.following):
            x.zero_()
        self.segments.fill_(PADDING)
        self.marks, self.taken, self.fresh, self.by_row = None, 0, True, False
        self._read_own_rows()
        for ring in self.rings.values():
            ring.reset()

    def fill(self, other: "Cache", copies: int) -> None:
        """Copy another cache with as many slots, repeating each of its rows `copies` times."""

        def copied(x: Tensor) -> Tensor:
            return x if x.shape[0] != len(other.segment) else x.repeat_interleave(copies, dim=0)

        for own, its in zip(self._state(), other._state(), strict=True):
            own.unflatten(0, (len(its), copies)).copy_(its[:, None])
        for layer, source_layer in zip(self.layers, other.layers, strict=True):
            if source_layer.cross is not None:
                k, v = source_layer.cross
                layer.keep_cross(*((copied(k), copied(v)) if self.origins is None else (k, v, copies)))
        if (source := other.source) is not None:
            segments = None if source.segments is None else copied(source.segments)
            states = None if other.states is None else copied(other.states)
            origins = None
            if self.origins is not None:
                rows = torch.arange(len(self.origins), device=self.origins.device)[:, None] // copies
                origins = rows.expand(-1, source.positions.shape[1])
            source = source._replace(positions=copied(source.positions), segments=segments, origins=origins)
            self.keep_source(source, states)
        self.marks = None if other.marks is None else copied(other.marks)
        self._read_own_rows()
        self.length.copy_(other.length)
        self.row_length.unflatten(0, (-1, copies)).copy_(other.row_length[:, None])
        self.taken, self.fresh, self.by_row = other.taken, other.fresh, other.by_row

    def truncate(self, length: int) -> None:
        """Remove all but the first `length` slots; a ring or a recurrent state can remove at most `slack` tokens."""
        if not 0 <= length <= self.slots:
            raise ValueError(f"length = {length}: must be from 0 to {self.slots}")
        self._remove(real(self.segments[:, :length]).sum(dim=1))
        self.length.clamp_(max=length)
        self.row_length.clamp_(max=length)
        self.taken, self.fresh = min(self.taken, length), self.fresh or length == 0
        self.segments[:, length:] = PADDING
        self._recompute_newest()

    def _recompute_newest(self) -> None:
        self.segment.zero_()
        self.following.zero_()
        self._update_newest(self.positions, self.segments)

    def forget(self, n: Tensor) -> None:
        """Remove the newest `n` [b] real tokens of each row; a ring or a recurrent state can remove at most `slack`.

        If rows differ in `n`, slots are left empty; in split rows, whose tokens all continue one segment, none are.
        """
        if self.by_row:
            if self.rings or self._recurrent():
                self._remove(real(self.segments).sum(dim=1) - n)
            self.row_length -= n
            self.following -= n
            index = torch.arange(self.slots, device=n.device)
            self.segments.masked_fill_(index >= self.row_length[:, None], PADDING)
            return
        is_real = real(self.segments)
        left = is_real.sum(dim=1) - n
        self._remove(left)
        self.segments.masked_fill_(is_real & (is_real.cumsum(dim=1) > left[:, None]), PADDING)
        self._recompute_newest()

    def _recurrent(self) -> list[StateCache]:
        """Return the layers that store a state rather than tokens."""
        return [layer for layer in self.layers if isinstance(layer, StateCache)]

    def _remove(self, left: Tensor) -> None:
        """Remove all but the first `left` [b] real tokens of each row, in layers that do not store tokens by slot."""
        removed, states = None, self._recurrent()
        if states:
            removed = (real(self.segments).sum(dim=1) - left).clamp(min=0)
        if self.on_host():
            for state in states:
                assert removed is not None
                state.check(removed)
            for ring in self.rings.values():
                ring.check(left)
        for ring in self.rings.values():
            ring.truncate(left)
        for state in states:
            assert removed is not None
            state.forget(removed)

    def _state(self) -> list[Tensor]:
        """Return the state of each row [b, ...], without its source."""
        state = [self.positions, self.segments, self.segment, self.following]
        state += [x for ring in self.rings.values() for x in ring.tensors()]
        return state + [x for layer in self.layers for x in layer.own()]

    def reorder(self, rows: Tensor, *, group_size: int | None = None) -> None:
        """Replace row i by row `rows[i]` (beam search).

        With `group_size`, rows move only within groups of that many neighbours, which share a source and a layout:
        copies of one prompt that have read tokens and gaps in the same places. Only what layers store is moved then.
        """
        if rows.shape != self.segment.shape:
            raise ValueError(f"rows has shape {list(rows.shape)}, expected {list(self.segment.shape)} like the batch")
        state = [x for layer in self.layers for x in layer.own()]
        if self.origins is not None:
            assert group_size is not None
            state = [x for layer in self._unshared() for x in layer.own()]
            self.origins.copy_(self.origins.index_select(0, rows))
        source: list[Tensor] = []  # a source of as many tokens as there are slots is full from the start
        if group_size is None:
            state = self._state()
            if self.marks is not None:
                state.append(self.marks)
            if self.by_row:
                state.append(self.row_length)
            source += [x for layer in self.layers for x in layer.cross or ()]
            if self.states is not None:
                source.append(self.states)
            if self.source is not None:
                source += [x for x in self.source[:3] if x is not None and x.shape[0] == rows.shape[0]]
        else:
            for x in [x for x in state if can_reorder_in_groups(x, group_size)]:
                full = x.shape[2] == self.slots  # otherwise a ring, filled in another order, or a recurrent state
                reorder_in_groups(x, rows, self.length if full else self.everywhere, group_size)
            state = [x for x in state if not can_reorder_in_groups(x, group_size)]
        for x in (*(x[:, :, : self.taken] if self._can_skip_empty(x) else x for x in state), *source):
            x.copy_(x.index_select(0, rows))

    def _unshared(self) -> list[LayerCache | StateCache]:
        """Return the layers that store a window or a state, which `share_rows` does not concern."""
        sized = zip(self.layers, self.sizes, strict=True)
        return [x for x, size in sized if isinstance(x, StateCache) or size.reach in self.rings]

    def _can_skip_empty(self, x: Tensor) -> bool:
        """Return whether the host can skip the empty slots of x."""
        return x.dim() == 4 and x.shape[2] == self.slots and x.device.type == "cpu"

    def nbytes(self) -> int:
        """Return the bytes of keys and values, including cross-attention's and the encoder states."""
        stored = [x for layer in self.layers for x in layer.tensors()]
        return sum(x.nbytes for x in stored) + (0 if self.states is None else self.states.nbytes)
