"""Inputs: from ids or numbers to vectors.

Each tells the batch and length of what it is given, or what is wrong with it, and reads it; `embed` adds positions.
"""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.layout import Layout
from anyformer.config import (
    ByteSpelling,
    ConfigError,
    FactorisedTable,
    Fault,
    Features,
    Input,
    NoSpelling,
    Patches,
    Spelling,
    Tokens,
    factor,
)
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.dropout import Dropout
from anyformer.nn.norm import build_norm, normed

Embed = Callable[[Tensor], Tensor]


def embedding(rows: int, width: int, pad: int | None = None) -> nn.Embedding:
    """Empty, to be filled with the rest of the model: to draw numbers on meta, torch would import its compiler."""
    return nn.Embedding(rows, width, padding_idx=pad, _weight=torch.empty(rows, width))


class ByteWords(nn.Module):
    """A vector of each token's word, by its bytes + 1; 0 stands for nothing, and of nothing the vector is 0."""

    def __init__(self, spec: ByteSpelling, width: int):
        super().__init__()
        self.longest, self.margins = spec.longest, ((spec.kernel - 1) // 2, spec.kernel // 2)
        self.table = embedding(BYTES, spec.width)
        self.conv = nn.Conv1d(spec.width, spec.channels, spec.kernel)
        self.linear = nn.Linear(spec.channels, width, bias=False)

    def forward(self, spelled: Tensor) -> Tensor:
        """[b, t, longest] to [b, t, width]"""
        there = spelled > 0
        x = self.table(F.pad(spelled, self.margins)).flatten(0, 1).transpose(1, 2)  # beyond its ends there is nothing
        x = self.conv(x).unflatten(0, spelled.shape[:2])  # [b, t, channels, longest]
        x = x.masked_fill(~there[:, :, None], torch.finfo(x.dtype).min).amax(dim=-1)
        return self.linear(torch.where(there.any(dim=-1, keepdim=True), x, 0))


BYTES = 257  # and nothing


def build_spelling(spec: Spelling, width: int) -> ByteWords | None:
    match spec:
        case NoSpelling():
            return None
        case ByteSpelling():
            return ByteWords(spec, width)
        case _:
            assert_never(spec)


class TokenInput(nn.Module):
    """Lookup, scale, spelling, positions, types, norm, dropout. The table may be another's (tying), so `forward` is
    given it."""

    def __init__(self, spec: Tokens, width: int, own_table: bool):
        super().__init__()
        e, self.inner_width = spec.table_width(width), spec.inner_width(width)
        self.vocab, self.pad = spec.rows, spec.pad
        self.table = embedding(spec.rows, e, spec.pad) if own_table else None
        self.types = embedding(spec.types, self.inner_width) if spec.types else None
        table = spec.table if isinstance(spec.table, FactorisedTable) else None
        self.project = nn.Linear(e, width, table.bias) if table else None
        self.early = table is not None and table.project == "before_position"
        self.spelling = build_spelling(spec.spelling, self.inner_width)
        self.norm = build_norm(spec.norm, self.inner_width)
        self.dropout = Dropout(spec.dropout)
        self.scale = factor(spec.scale, width)

    def measure(self, ids: Tensor) -> tuple[int, int]:
        """[b, t]"""
        if not isinstance(ids, Tensor):
            raise ValueError(f"ids must be a tensor [batch, length], got {type(ids).__name__}")
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids must be whole numbers [batch, length], got {ids.dtype} {list(ids.shape)}")
        _check_some(ids, "ids")
        return ids.shape[0], ids.shape[1]

    def check_spelled(self, ids: Tensor, spelled: Tensor | None) -> None:
        """That words are spelled where the model reads them so, and only there."""
        if self.spelling is None:
            if spelled is not None:
                raise ValueError("this model reads no spelled words: leave `spelled` out")
            return
        shape = [*ids.shape, self.spelling.longest]
        if spelled is None:
            what = f"is required: the model reads each token's word in bytes, too, {shape} whole numbers"
            raise ConfigError([Fault("spelled", what)])
        if list(spelled.shape) != shape or spelled.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"spelled must be whole numbers {shape}, got {spelled.dtype} {list(spelled.shape)}")

    def forward(
        self,
        ids: Tensor,
        table: Tensor,
        embed: Embed,
        layout: Layout,
        types: Tensor | None = None,
        notes: AuxOutputs | None = None,
        spelled: Tensor | None = None,
    ) -> Tensor:
        """[b, t] ids to [b, t, d]"""
        x = F.embedding(ids, table, padding_idx=self.pad) * self.scale
        if self.project is not None and self.early:
            x = self.project(x)
        if self.spelling is not None:
            assert spelled is not None
            x = x + self.spelling(spelled)
        x = embed(x)
        if self.types is not None:
            # all of the first kind: a sum is its gradient, where a lookup would add up row by row
            x = x + (self.types.weight[0] if types is None else self.types(types))
        x = self.dropout(normed(self.norm, x, layout, notes))
        return x if self.project is None or self.early else self.project(x)


class FeatureInput(nn.Module):
    """Projection, positions, norm, dropout."""

    def __init__(self, spec: Features | Patches, width: int):
        super().__init__()
        self.inner_width, self.size = width, spec.size
        self.project = nn.Linear(spec.size, width, spec.bias)
        self.norm, self.dropout = build_norm(spec.norm, width), Dropout(spec.dropout)

    def measure(self, x: Tensor) -> tuple[int, int]:
        """[b, t]"""
        _check_numbers(x, "features", (None, None, self.size), f"[batch, length, {self.size}]")
        return x.shape[0], x.shape[1]

    def vectors(self, x: Tensor) -> Tensor:
        """[b, t, size] to [b, t, d], before positions."""
        return self.project(x.to(self.project.weight.dtype))

    def forward(self, x: Tensor, embed: Embed, layout: Layout, notes: AuxOutputs | None = None) -> Tensor:
        """Frames or images to [b, t, d]"""
        return self.dropout(normed(self.norm, embed(self.vectors(x)), layout, notes))


class PatchInput(FeatureInput):
    """Squares of an image as frames, row by row, after a learned class token."""

    def __init__(self, spec: Patches, width: int):
        super().__init__(spec, width)
        self.patch, self.shape, self.length = spec.patch, spec.shape, spec.length
        self.class_token = embedding(1, width) if spec.class_token else None

    def measure(self, x: Tensor) -> tuple[int, int]:
        c, h, w = self.shape
        _check_numbers(x, "images", (None, *self.shape), f"[batch, {c}, {h}, {w}]")
        return x.shape[0], self.length

    def vectors(self, x: Tensor) -> Tensor:
        x = super().vectors(self.cut(x))
        if self.class_token is None:
            return x
        return torch.cat((self.class_token.weight.expand(x.shape[0], 1, -1), x), dim=1)

    def cut(self, images: Tensor) -> Tensor:
        """[b, c, h, w] to [b, patches, c·p·p]"""
        return F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)


AnyInput = TokenInput | FeatureInput


def build_input(spec: Input, width: int, *, own_table: bool = True) -> AnyInput:
    match spec:
        case Tokens():
            return TokenInput(spec, width, own_table)
        case Patches():
            return PatchInput(spec, width)
        case Features():
            return FeatureInput(spec, width)
        case _:
            assert_never(spec)


def _check_numbers(x: Tensor, name: str, sizes: tuple[int | None, ...], shape: str) -> None:
    fits = x.dim() == len(sizes) and all(want in (None, n) for n, want in zip(x.shape, sizes, strict=True))
    if not fits or not x.is_floating_point():
        raise ValueError(f"{name} must be floating-point numbers {shape}, got {x.dtype} {list(x.shape)}")
    _check_some(x, name)


def _check_some(x: Tensor, name: str) -> None:
    if not x.numel():
        raise ValueError(f"{name} are empty, {list(x.shape)}: give at least one row, of at least one token")
