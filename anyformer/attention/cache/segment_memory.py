"""Segment memory: the newest tokens of the segments before the one at hand (Transformer-XL, Dai et al. 2019).

A long text is read in segments. Each also reads the newest `memory` tokens before it and passes on its own; no gradient
flows back into them. `Past` is a value: a forward pass takes one and returns another, and writes to neither. So a pass
can be repeated (activation checkpointing runs a block twice) and a step can be dropped.

As in the paper, the memory stores the input of each layer's mixer, not its keys and values as a KV cache does. These
are recomputed for every segment by the current weights, which so learn to use the memory. With frozen weights both give
the same result.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from anyformer.attention.layout import Layout, check, choose_segments, real, segment_positions
from anyformer.kernels.conventions import PADDING


class Past(NamedTuple):
    """Segment memory of all layers: the newest real tokens of each row, empty slots first. Made by `model.new_past`."""

    positions: Tensor  # int [b, m]
    segments: Tensor  # int [b, m]; PADDING: an empty slot
    layers: tuple[Tensor, ...]  # [b, m, d]; [b, m, 0] for a layer that reads no other tokens

    @classmethod
    def empty(cls, batch: int, slots: int, widths: Sequence[int], device: torch.device, dtype: torch.dtype) -> "Past":
        positions = torch.zeros(batch, slots, dtype=torch.long, device=device)
        layers = tuple(torch.zeros(batch, slots, width, device=device, dtype=dtype) for width in widths)
        return cls(positions, torch.full_like(positions, PADDING), layers)

    def check(self, slots: int, layers: int) -> None:
        """Raise a ValueError if this is not the memory of a model with so many slots and layers."""
        if (self.positions.shape[1], len(self.layers)) != (slots, layers):
            own = f"{len(self.layers)} layers and {self.positions.shape[1]} tokens"
            raise ValueError(f"this past has {own}, of another model: use `new_past`")

    def make_layout(
        self,
        batch: int,
        length: int,
        segments: Tensor | None,
        positions: Tensor | None,
        padding: Literal["none", "right", "any"] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Layout:
        """Return the layout of new tokens; by default they continue the segment of each row's newest token."""
        if batch != self.positions.shape[0]:
            raise ValueError(f"the past has a batch of {self.positions.shape[0]}, the input one of {batch}")
        check(batch, length, positions=positions)
        begun = real(self.segments[:, -1])
        segment, following = (torch.where(begun, x[:, -1], 0) for x in (self.segments, self.positions + 1))
        segments = choose_segments(batch, length, segments, attention_mask, segment)
        if padding is None:
            padding = "none" if segments is None else "any"
        new = (segment[:, None] if segments is None else segments).expand(batch, length)
        if positions is None:
            positions = segment_positions(new, segment, following)
        return Layout(positions.expand(batch, length), new, padding=padding)

    def keys(self, new: Layout) -> Layout:
        """Return the layout of what new tokens may read: the memory, then themselves."""
        assert new.segments is not None
        positions = torch.cat((self.positions, new.positions), dim=1)
        return Layout(positions, torch.cat((self.segments, new.segments), dim=1))

    def after(self, new: Layout, layers: Sequence[Tensor | None]) -> "Past":
        """Return the past of the next segment: the newest real tokens of this past and of new tokens.

        `layers` are the new inputs of each layer's mixer [b, t, d]; None for a layer without one.
        """
        assert new.segments is not None
        length = new.positions.shape[1]
        stay: Tensor | None = None
        if new.padding != "none":  # padding comes first in the order, and is dropped
            both = torch.cat((self.segments, new.segments), dim=1)
            stay = real(both).int().argsort(dim=1, stable=True)[:, length:]

        def newest(old: Tensor, new: Tensor) -> Tensor:
            """Return the newest of [b, tokens] or [b, tokens, d]; never a view."""
            both = torch.cat((old, new.detach().to(old.dtype)), dim=1)
            if stay is None:
                return both[:, length:].clone()
            return both.gather(1, stay if old.dim() == 2 else stay[..., None].expand_as(old))

        pairs = zip(self.layers, layers, strict=True)
        merged = tuple(old if new is None else newest(old, new) for old, new in pairs)
        return Past(newest(self.positions, new.positions), newest(self.segments, new.segments), merged)


class LayerMemory:
    """Segment memory of one layer in one call: the old tokens that it reads, and the new ones that it stores."""

    def __init__(self, old: Tensor):
        self.old = old
        self.new: Tensor | None = None  # the mixer's input [b, t, d]; stays None in a layer without a mixer

    def append(self, x: Tensor) -> Tensor:
        """Return the tokens in memory, then new ones [b, t, d], which are stored."""
        self.new = x.detach()
        return torch.cat((self.old.detach().to(x.dtype), x), dim=1)


class MemoryUpdate:
    """Segment memory in one forward pass: what the layers read, and what they leave for the next segment."""

    def __init__(self, past: Past):
        self.past = past
        self.memory_out: list[Tensor | None] = []  # by layer, as `Past.after` takes it
