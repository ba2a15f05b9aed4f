"""Rows of unequal length, for models of `transformers` and ours."""

from typing import NamedTuple

import torch
from torch import Tensor


class Ragged(NamedTuple):
    """Rows of unequal length."""

    ids: Tensor
    real: Tensor  # bool [b, t]

    @property
    def segments(self) -> Tensor:
        return self.real.long() - 1

    @property
    def positions(self) -> Tensor:
        return (self.real.cumsum(1) - 1).clamp(min=0)

    @property
    def mask(self) -> Tensor:
        return self.real.long()

    def extended(self, new: Tensor) -> "Ragged":
        return Ragged(torch.cat((self.ids, new), 1), torch.cat((self.real, torch.ones_like(new, dtype=torch.bool)), 1))


def ragged(*lengths: int, first: int, vocab: int, pad: int, side: str = "right", seed: int = 0) -> Ragged:
    """Ids from `first` on; the same rows whichever side the pads are on."""
    rng = torch.Generator().manual_seed(seed)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    real = real.flip(1) if side == "left" else real
    ids = torch.full(real.shape, pad)
    ids[real] = torch.randint(first, vocab, (sum(lengths),), generator=rng)
    return Ragged(ids, real)
