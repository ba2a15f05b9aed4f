"""The key/value cache: an object outside the model, zero-filled, with fixed addresses and static shapes.

Slots are filled in order of arrival; positions and segments say what stands in a slot, so ragged rows, pads and dropped
tokens need no special case: whoever reads the cache sees only slots of its own segment. All state is tensors, so a
decode step compiles once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.nn.mask import PADDING, Layout, check, count_within, real


class Sizes(NamedTuple):
    """What one layer keeps: key/value heads and their widths."""

    groups: int
    key_width: int
    value_width: int


class LayerCache:
    """The keys and values of one layer (of one application, where layers share weights)."""

    def __init__(self, batch: int, slots: int, sizes: Sizes, device: torch.device, dtype: torch.dtype):
        g, k, k_v = sizes
        self.keys = torch.zeros(batch, g, slots, k, device=device, dtype=dtype)
        self.values = torch.zeros(batch, g, slots, k_v, device=device, dtype=dtype)
        self.cross: tuple[Tensor, Tensor] | None = None  # cross-attention: written once, read ever after

    def append(self, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Writes new keys and values [b, g, t, k] into slots `at` [t] and returns all [b, g, slots, k]."""
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        return self.keys, self.values


class Cache:
    """What a decoder has read so far. Made by `model.new_cache`."""

    def __init__(self, batch: int, slots: int, sizes: tuple[Sizes, ...], device: torch.device, dtype: torch.dtype):
        self.layers = [LayerCache(batch, slots, size, device, dtype) for size in sizes]
        self.slots = slots
        self.length = torch.zeros((), dtype=torch.long, device=device)  # slots taken
        self.positions = torch.zeros(batch, slots, dtype=torch.long, device=device)
        self.segments = torch.full((batch, slots), PADDING, dtype=torch.long, device=device)
        self.segment = torch.zeros(batch, dtype=torch.long, device=device)  # of each row's newest real token
        self.following = torch.zeros(batch, dtype=torch.long, device=device)  # the position after it
        self.source: Layout | None = None  # where the encoder's tokens stand

    def lay_out(self, batch: int, length: int, segments: Tensor | Layout | None, positions: Tensor | None) -> Layout:
        """The layout of new tokens; what is not given goes on from what the cache holds."""
        if batch != self.segment.shape[0]:
            raise ValueError(f"the cache was made for a batch of {self.segment.shape[0]}, got {batch}")
        if isinstance(segments, Layout):
            positions, segments = segments.positions, segments.segments
        check(batch, length, segments=segments, positions=positions)
        segments = (self.segment[:, None] if segments is None else segments).expand(batch, length)
        if positions is None:
            positions = count_within(segments, self.segment, self.following)
        return Layout(positions.expand(batch, length), segments)

    def take(self, new: Layout) -> tuple[Layout, Tensor]:
        """Reserves slots for new tokens; returns the layout of all slots, the keys of this step, and the new slots."""
        assert new.segments is not None
        length = new.segments.shape[1]
        # reading the length waits for the device, so only where Python runs anyway
        if not torch.compiler.is_compiling() and int(self.length) + length > self.slots:
            raise ValueError(f"the cache has {self.slots} slots, {int(self.length)} taken: {length} more do not fit")
        at = self.length + torch.arange(length, device=self.length.device)
        self.positions.index_copy_(1, at, new.positions)
        self.segments.index_copy_(1, at, new.segments)
        self.length += length
        self._settle()
        return Layout(self.positions, self.segments), at

    def _settle(self) -> None:
        """Finds each row's newest real token."""
        index = torch.arange(self.slots, device=self.length.device)
        newest = torch.where(real(self.segments), index, -1).max(dim=1, keepdim=True).values
        any_real = newest >= 0
        newest = newest.clamp(min=0)
        self.segment.copy_(torch.where(any_real, self.segments.gather(1, newest), 0)[:, 0])
        self.following.copy_(torch.where(any_real, self.positions.gather(1, newest) + 1, 0)[:, 0])

    def keep_source(self, source: Layout) -> None:
        """Remembers where the encoder's tokens stand: a copy, since `reorder` writes to it."""
        segments = None if source.segments is None else source.segments.clone()
        self.source = source._replace(positions=source.positions.clone(), segments=segments)

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` slots."""
        if not 0 <= length <= self.slots:
            raise ValueError(f"length = {length}: must be from 0 to {self.slots}")
        self.length.clamp_(max=length)
        self.segments[:, length:] = PADDING
        self._settle()

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was (beam search)."""
        if rows.shape != self.segment.shape:
            raise ValueError(f"rows has shape {list(rows.shape)}, expected {list(self.segment.shape)} like the batch")
        state = [self.positions, self.segments, self.segment, self.following]
        for layer in self.layers:
            state += [layer.keys, layer.values, *(layer.cross or ())]
        if self.source is not None:
            state += [x for x in self.source[:3] if x is not None and x.shape[0] == rows.shape[0]]
        for x in state:
            x.copy_(x.index_select(0, rows))

    def nbytes(self) -> int:
        """Bytes of keys and values, cross-attention's included."""
        kept = [x for layer in self.layers for x in (layer.keys, layer.values, *(layer.cross or ()))]
        return sum(x.nbytes for x in kept)
