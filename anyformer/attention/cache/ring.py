"""Ring of slots for layers with a causal window: the r-th real token of a row is in slot r mod size.

A ring holds the newest `reach` tokens of every row, and `slack` more, so that up to `slack` tokens can be removed.
Padding is written to extra slots after the ring, visible to padding only. Tokens must come in order, so that a window
is the newest tokens.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from anyformer.attention.layout import Layout, real
from anyformer.kernels.conventions import PADDING


class SlotWriter(Protocol):
    """Destination of new tokens in a layer's cache."""

    def store(self, stored: Tensor, new: Tensor) -> None:
        """Write new [b, g, t, k] into stored [b, g, slots, k], in place."""

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        """Do the same; return all that can be read."""


class Slots(NamedTuple):
    """The same slots for all rows."""

    at: Tensor  # int [t]

    def store(self, stored: Tensor, new: Tensor) -> None:
        stored.index_copy_(2, self.at, new)

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        return stored.index_copy_(2, self.at, new)


class SharedSlots(NamedTuple):
    """The same slots for all rows, each of which reads slots of other rows, too (beams)."""

    at: Tensor  # int [t]
    origins: Tensor  # int [b, slots]: the row that holds each token
    gathers: bool = True  # return copies of what the rows read; otherwise what is stored, for a kernel that finds it

    def store(self, stored: Tensor, new: Tensor) -> None:
        stored.index_copy_(2, self.at, new)

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        self.store(stored, new)
        return self.read(stored) if self.gathers else stored

    def read(self, stored: Tensor) -> Tensor:
        groups, slots = (torch.arange(n, device=stored.device) for n in stored.shape[1:3])
        return stored[self.origins[:, None], groups[:, None], slots]


class RowSlots(NamedTuple):
    """Slots that differ between rows; in a ring, their old tokens are outside every window."""

    at: Tensor  # int [b, t]

    def store(self, stored: Tensor, new: Tensor) -> None:
        stored.scatter_(2, self.at[:, None, :, None].expand_as(new), new)

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        self.store(stored, new)
        return stored


class Overflow(NamedTuple):
    """More new tokens than free slots: attention reads old and new ones, and the newest of both stay."""

    stay: Tensor  # int [b, slots]: index among the new tokens of the one in each slot; -1: the old token

    def store(self, stored: Tensor, new: Tensor) -> None:
        stay = self.stay[:, None, :, None]
        newest = new.gather(2, stay.clamp(min=0).expand(-1, new.shape[1], -1, new.shape[3]))
        stored.copy_(torch.where(stay < 0, stored, newest))

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        both = torch.cat((stored, new), dim=2)
        self.store(stored, new)
        return both


class FirstTokens(NamedTuple):
    """The first tokens of an empty cache, which read nothing but themselves."""

    writer: SlotWriter

    def store(self, stored: Tensor, new: Tensor) -> None:
        self.writer.store(stored, new)

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        self.writer.store(stored, new)
        return new


class Step(NamedTuple):
    """Keys that the layers of one ring, or of none, read in a step, and where they write."""

    keys: Layout
    write_at: SlotWriter | None = None  # None: no cache


class Ring:
    """Positions and segments of the tokens stored by all layers of one reach."""

    def __init__(self, batch: int, reach: int, slack: int, device: torch.device):
        self.reach, self.free = reach, max(slack, 1)  # one free slot, for a token to replace one outside its window
        self.size = reach + self.free
        self.slots = self.size + self.free
        self.positions = torch.zeros(batch, self.slots, dtype=torch.long, device=device)
        self.segments = torch.full((batch, self.slots), PADDING, dtype=torch.long, device=device)
        self.count = torch.zeros(batch, dtype=torch.long, device=device)  # real tokens read
        self.lost = torch.zeros(batch, dtype=torch.long, device=device)  # of them, overwritten ones

    def take(self, new: Layout, first: bool = False) -> Step:
        """Allocate slots for new tokens; the `first` ones read each other only."""
        assert new.segments is not None
        writer: SlotWriter = self._writer(real(new.segments))
        writer = FirstTokens(writer) if first else writer
        positions = _write(writer, self.positions, new.positions.expand_as(new.segments))
        segments = _write(writer, self.segments, new.segments)
        keys = new if first else Layout(positions, segments)
        self.count += real(new.segments).sum(dim=1)
        self.lost.copy_(torch.maximum(self.lost, self.count - self.size))
        return Step(keys, writer)

    def _writer(self, is_real: Tensor) -> SlotWriter:
        length = is_real.shape[1]
        index = torch.arange(length, device=is_real.device)
        if length <= self.free:
            rank = self.count[:, None] + is_real.cumsum(dim=1) - 1
            return RowSlots(torch.where(is_real, rank % self.size, self.size + index))
        slot = torch.arange(self.slots, device=is_real.device)
        last = (self.count + is_real.sum(dim=1))[:, None] - 1
        rank = last - (last - slot) % self.size - self.count[:, None]  # rank among new tokens of the one for each slot
        order = torch.where(is_real, index, length).sort(dim=1).values  # real tokens first
        newest = order.gather(1, rank.clamp(0, length - 1))
        return Overflow(torch.where((rank >= 0) & (slot < self.size), newest, -1))

    def check(self, left: Tensor) -> None:
        """Raise if tokens in the window of a row with `left` [b] real tokens were overwritten."""
        if bool((self.lost > (left - self.reach).clamp(min=0)).any()):
            raise ValueError(
                f"the cache of a window of {self.reach} tokens can remove at most {self.free} tokens: "
                "use more slack (new_cache(..., slack=n)), or kind = 'static'"
            )

    def truncate(self, left: Tensor) -> None:
        """Remove all but the first `left` [b] real tokens of each row."""
        slot = torch.arange(self.slots, device=left.device)
        last = self.count[:, None] - 1
        rank = last - (last - slot) % self.size
        self.segments.masked_fill_(rank >= left[:, None], PADDING)
        self.count.copy_(torch.minimum(self.count, left))

    def reset(self) -> None:
        """Empty the ring."""
        self.segments.fill_(PADDING)
        for x in (self.positions, self.count, self.lost):
            x.zero_()

    def tensors(self) -> tuple[Tensor, ...]:
        return self.positions, self.segments, self.count, self.lost


def _write(writer: SlotWriter, stored: Tensor, new: Tensor) -> Tensor:
    """Write [b, t] values to [b, slots] as vectors of one element, [b, 1, slots, 1]; return all that can be read."""
    return writer.write(stored[:, None, :, None], new[:, None, :, None])[:, 0, :, 0]
