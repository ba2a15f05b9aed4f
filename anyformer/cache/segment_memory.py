"""The past: what a decoder keeps of the segments before the one at hand (Transformer-XL, Dai et al. 2019).

A text is read in segments. Each reads the newest `memory` tokens before it, too, and passes on its own; no gradient
goes back into them. The past is a value: one comes in, another goes out, and nothing is written to, so that a pass can
be repeated (activation checkpointing runs a block twice) and a step be dropped.

Kept is what a layer's mixer read, as in the paper, and not the keys and values that it made of it, as in a cache: they
are made again for every segment, by the weights of today, which so learn what to make of a memory. With weights that
stand still the two say the same.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from anyformer.attention.layout import Layout, check, real, segment_positions
from anyformer.conventions import PADDING


class Past(NamedTuple):
    """The newest real tokens of each row, in slots of fixed number; empty ones come first. Made by `model.new_past`."""

    positions: Tensor  # int [b, m]
    segments: Tensor  # int [b, m]; PADDING: empty
    layers: tuple[Tensor, ...]  # [b, m, d]; [b, m, 0] of a layer that reads no other tokens

    @classmethod
    def empty(cls, batch: int, slots: int, widths: Sequence[int], device: torch.device, dtype: torch.dtype) -> "Past":
        positions = torch.zeros(batch, slots, dtype=torch.long, device=device)
        layers = tuple(torch.zeros(batch, slots, width, device=device, dtype=dtype) for width in widths)
        return cls(positions, torch.full_like(positions, PADDING), layers)

    def make_layout(
        self, batch: int, length: int, segments: Tensor | Layout | None, positions: Tensor | None
    ) -> Layout:
        """The layout of new tokens; what is not given goes on from each row's newest token."""
        if batch != self.positions.shape[0]:
            raise ValueError(f"the past is of a batch of {self.positions.shape[0]}, got {batch}")
        padding: Literal["none", "right", "any"] = "none" if segments is None else "any"
        if isinstance(segments, Layout):
            padding, positions, segments = segments.padding, segments.positions, segments.segments
        check(batch, length, segments=segments, positions=positions)
        begun = real(self.segments[:, -1])
        segment, following = (torch.where(begun, x[:, -1], 0) for x in (self.segments, self.positions + 1))
        at = (segment[:, None] if segments is None else segments).expand(batch, length)
        if positions is None:
            positions = segment_positions(at, segment, following)
        return Layout(positions.expand(batch, length), at, padding=padding)

    def keys(self, new: Layout) -> Layout:
        """What new tokens may read: the past, and themselves."""
        assert new.segments is not None
        positions = torch.cat((self.positions, new.positions), dim=1)
        return Layout(positions, torch.cat((self.segments, new.segments), dim=1))

    def after(self, new: Layout, kept: Sequence[Tensor | None]) -> "Past":
        """The past of the next segment: of old and new tokens the newest that are real."""
        assert new.segments is not None
        length = new.positions.shape[1]
        stay: Tensor | None = None
        if new.padding != "none":  # pads go first, and out
            both = torch.cat((self.segments, new.segments), dim=1)
            stay = real(both).int().argsort(dim=1, stable=True)[:, length:]

        def newest(old: Tensor, new: Tensor) -> Tensor:
            """Of facts [b, tokens] or vectors [b, tokens, d]; always a tensor of its own."""
            both = torch.cat((old, new.detach().to(old.dtype)), dim=1)
            if stay is None:
                return both[:, length:].clone()
            return both.gather(1, stay if old.dim() == 2 else stay[..., None].expand_as(old))

        layers = tuple(old if new is None else newest(old, new) for old, new in zip(self.layers, kept, strict=True))
        return Past(newest(self.positions, new.positions), newest(self.segments, new.segments), layers)


class Recall:
    """The past of one layer in one run of its block, which reads it and leaves what is new."""

    def __init__(self, old: Tensor):
        self.old = old
        self.new: Tensor | None = None  # a layer without a mixer leaves nothing

    def append(self, x: Tensor) -> Tensor:
        """New tokens [b, t, d] behind those of the past: all that can be read."""
        self.new = x.detach()
        return torch.cat((self.old.detach().to(x.dtype), x), dim=1)
