"""The past: what a decoder keeps of the segments before the one at hand (Transformer-XL, Dai et al. 2019).

A text is read in segments. Each reads the newest `memory` tokens before it, too, and passes on its own; no gradient
goes back into them. The past is a value: one comes in, another goes out, and nothing is written to, so that a pass can
be repeated (activation checkpointing runs a block twice) and a step be dropped.

The paper keeps hidden states, and projects them again for every segment. Here keys and values are kept, as a cache does
(of latent attention its compressed rows): reading on is then the same function in training and in decoding, and a
memory costs no second projection. The price: they are as the weights were when they were made, and the projections
learn from the segment at hand alone.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from anyformer.nn.cache import Sizes
from anyformer.nn.mask import PADDING, Layout, check, count_within, real

Kept = tuple[Tensor, Tensor]
"""Keys and values [b, g, tokens, k] of one layer, or what it keeps in their place."""


class Past(NamedTuple):
    """The newest real tokens of each row, in slots of fixed number; empty ones come first. Made by `model.new_past`."""

    positions: Tensor  # int [b, m]
    segments: Tensor  # int [b, m]; PADDING: empty
    layers: tuple[Kept, ...]

    @classmethod
    def empty(
        cls, batch: int, slots: int, sizes: tuple[Sizes, ...], device: torch.device, dtype: torch.dtype
    ) -> "Past":
        def zeros(groups: int, width: int) -> Tensor:
            return torch.zeros(batch, groups, slots, width, device=device, dtype=dtype)

        positions = torch.zeros(batch, slots, dtype=torch.long, device=device)
        layers = tuple((zeros(s.groups, s.key_width), zeros(s.groups, s.value_width)) for s in sizes)
        return cls(positions, torch.full_like(positions, PADDING), layers)

    def lay_out(self, batch: int, length: int, segments: Tensor | Layout | None, positions: Tensor | None) -> Layout:
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
            positions = count_within(at, segment, following)
        return Layout(positions.expand(batch, length), at, padding=padding)

    def keys(self, new: Layout) -> Layout:
        """What new tokens may read: the past, and themselves."""
        assert new.segments is not None
        positions = torch.cat((self.positions, new.positions), dim=1)
        return Layout(positions, torch.cat((self.segments, new.segments), dim=1))

    def after(self, new: Layout, kept: Sequence[Kept | None]) -> "Past":
        """The past of the next segment: of old and new tokens the newest that are real."""
        assert new.segments is not None
        slots, length = self.positions.shape[1], new.positions.shape[1]
        stay: Tensor | None = None
        if new.padding != "none":  # pads go first, and out
            both = torch.cat((self.segments, new.segments), dim=1)
            stay = real(both).int().argsort(dim=1, stable=True)[:, length:]

        def newest(old: Tensor, new: Tensor) -> Tensor:
            """Of facts [b, tokens] or vectors [b, g, tokens, k]; always a tensor of its own."""
            dim, new = (1 if old.dim() == 2 else 2), new.detach().to(old.dtype)
            if stay is not None:
                both = torch.cat((old, new), dim=dim)
                return both.gather(dim, stay if dim == 1 else stay[:, None, :, None].expand_as(old))
            old_count, new_count = max(slots - length, 0), min(slots, length)
            old = old.narrow(dim, slots - old_count, old_count)
            return torch.cat((old, new.narrow(dim, length - new_count, new_count)), dim=dim)

        layers = tuple(
            old if new is None else (newest(old[0], new[0]), newest(old[1], new[1]))
            for old, new in zip(self.layers, kept, strict=True)
        )
        return Past(newest(self.positions, new.positions), newest(self.segments, new.segments), layers)


class Recall:
    """The past of one layer in one run of its block, which reads it and leaves what is new."""

    def __init__(self, old: Kept):
        self.old = old
        self.new: Kept | None = None  # a layer without a mixer leaves nothing

    def append(self, k: Tensor, v: Tensor) -> Kept:
        """New keys and values behind those of the past: all that can be read."""
        self.new = k.detach(), v.detach()
        old_k, old_v = (x.detach() for x in self.old)
        return torch.cat((old_k.to(k.dtype), k), dim=2), torch.cat((old_v.to(v.dtype), v), dim=2)
