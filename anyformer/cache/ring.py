"""A ring of slots for layers that look back a bounded way: the r-th real token of a row goes to slot r mod size.

The newest `reach` tokens of every row are always there, and `slack` more, so that as many can be taken back. Pads take
no slot of the ring: behind it are a few more, which only pads see. Tokens come in order, so that what a window needs is
what came last.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from anyformer.attention.layout import Layout, real
from anyformer.conventions import PADDING


class SlotWriter(Protocol):
    """Where new tokens go."""

    def write(self, kept: Tensor, new: Tensor) -> Tensor:
        """Puts new [b, g, t, k] among those kept [b, g, slots, k], in place; returns what can be read now."""


class Slots(NamedTuple):
    """The same slots in every row."""

    at: Tensor  # int [t]

    def write(self, kept: Tensor, new: Tensor) -> Tensor:
        return kept.index_copy_(2, self.at, new)


class Around(NamedTuple):
    """Each row its own slots, none of which is still needed."""

    at: Tensor  # int [b, t]

    def write(self, kept: Tensor, new: Tensor) -> Tensor:
        return kept.scatter_(2, self.at[:, None, :, None].expand_as(new), new)


class Overflow(NamedTuple):
    """More tokens than slots are free: old and new are read together, and the newest of both stay."""

    stay: Tensor  # int [b, slots], which of old and new

    def write(self, kept: Tensor, new: Tensor) -> Tensor:
        both = torch.cat((kept, new), dim=2)
        kept.copy_(both.gather(2, self.stay[:, None, :, None].expand_as(kept)))
        return both


class Step(NamedTuple):
    """What the layers of one ring, or of none, read in this step, and where they write."""

    keys: Layout
    place: SlotWriter | None = None  # None: no cache


class Ring:
    """Where the tokens stand that the layers of one reach keep."""

    def __init__(self, batch: int, reach: int, slack: int, device: torch.device):
        self.reach, self.free = reach, max(slack, 1)  # a token may always take the place of the one it no longer sees
        self.size = reach + self.free
        self.slots = self.size + self.free
        self.positions = torch.zeros(batch, self.slots, dtype=torch.long, device=device)
        self.segments = torch.full((batch, self.slots), PADDING, dtype=torch.long, device=device)
        self.count = torch.zeros(batch, dtype=torch.long, device=device)  # real tokens read
        self.lost = torch.zeros(batch, dtype=torch.long, device=device)  # how many of them were written over

    def take(self, new: Layout) -> Step:
        """Makes room for new tokens."""
        assert new.segments is not None
        place = self._place(real(new.segments))
        keys = Layout(_write(place, self.positions, new.positions), _write(place, self.segments, new.segments))
        self.count += real(new.segments).sum(dim=1)
        self.lost.copy_(torch.maximum(self.lost, self.count - self.size))
        return Step(keys, place)

    def _place(self, is_real: Tensor) -> SlotWriter:
        length = is_real.shape[1]
        index = torch.arange(length, device=is_real.device)
        if length <= self.free:
            rank = self.count[:, None] + is_real.cumsum(dim=1) - 1
            return Around(torch.where(is_real, rank % self.size, self.size + index))
        slot = torch.arange(self.slots, device=is_real.device)
        last = (self.count + is_real.sum(dim=1))[:, None] - 1
        rank = last - (last - slot) % self.size - self.count[:, None]  # among the new, of what belongs into each slot
        order = torch.where(is_real, index, length).sort(dim=1).values  # real tokens first
        newest = order.gather(1, rank.clamp(0, length - 1))
        return Overflow(torch.where((rank >= 0) & (slot < self.size), self.slots + newest, slot))

    def check(self, left: Tensor) -> None:
        """An error where what the next tokens of a row with `left` [b] real ones would see is gone."""
        if bool((self.lost > (left - self.reach).clamp(min=0)).any()):
            raise ValueError(
                f"a window of {self.reach} tokens keeps only {self.free} more, so no more than that can be taken back: "
                "make the cache with more slack (new_cache(..., slack=n)), or with kind = 'static'"
            )

    def truncate(self, left: Tensor) -> None:
        """Forgets all but the first `left` [b] real tokens of each row."""
        slot = torch.arange(self.slots, device=left.device)
        last = self.count[:, None] - 1
        rank = last - (last - slot) % self.size
        self.segments.masked_fill_(rank >= left[:, None], PADDING)
        self.count.copy_(torch.minimum(self.count, left))

    def reset(self) -> None:
        """Empty again."""
        self.segments.fill_(PADDING)
        for x in (self.positions, self.count, self.lost):
            x.zero_()

    def tensors(self) -> tuple[Tensor, ...]:
        return self.positions, self.segments, self.count, self.lost


def _write(place: SlotWriter, kept: Tensor, new: Tensor) -> Tensor:
    """[b, slots] facts as vectors of one number, [b, 1, slots, 1]."""
    return place.write(kept[:, None, :, None], new[:, None, :, None])[:, 0, :, 0]
