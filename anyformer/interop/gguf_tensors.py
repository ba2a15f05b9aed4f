"""Tensors of GGUF files in their public form: changes of order and offset, each with its inverse."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from anyformer.interop.gguf_file import GgufTensor


class Change(Protocol):
    """A change of a tensor; `write` is the inverse of `read`."""

    def read(self, x: Tensor) -> Tensor: ...

    def write(self, x: Tensor) -> Tensor: ...

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the public shape of a tensor, of any shape in the file."""
        return stored


@dataclass(frozen=True)
class Same(Change):
    """No change."""

    def read(self, x: Tensor) -> Tensor:
        return x

    def write(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class RotaryPairs(Change):
    """Rows of queries or keys, whose rotary pairs are (2i, 2i + 1) in GGUF files and (i, i + k/2) in public ones."""

    heads: int

    def read(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    def write(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Flipped(Change):
    """GPT-2's matrices, which are [in, out] in public files."""

    def read(self, x: Tensor) -> Tensor:
        return x.t() if x.dim() == 2 else x

    def write(self, x: Tensor) -> Tensor:
        return self.read(x)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[::-1] if len(stored) == 2 else stored


@dataclass(frozen=True)
class PlusOne(Change):
    """Gemma's norm weights: 1 + γ in GGUF files."""

    def read(self, x: Tensor) -> Tensor:
        return x - 1

    def write(self, x: Tensor) -> Tensor:
        return x + 1


@dataclass(frozen=True)
class PublicTensor:
    """A tensor of a GGUF file in its public form."""

    inner: GgufTensor
    change: Change

    @property
    def file(self) -> Path:
        return self.inner.file

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.change.shape(self.inner.shape)

    def read(self) -> Tensor:
        return self.change.read(self.inner.read())
