"""Dropout that costs nothing where nothing is dropped, and little where something is."""

import torch
from torch import Tensor, nn

MIXERS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))  # a hash of 32 bits (Wellons 2018)


class Dropout(nn.Dropout):
    """torch's, without starting a kernel in evaluation: a decode step of a small model is made of such starts.

    In compiled training on a GPU, torch's random numbers take longer than all else that is done to a tensor in passing;
    there a hash of each place and one random number decides.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x
        if torch.compiler.is_compiling() and x.is_cuda and x.numel() < 2**31:
            seed = torch.randint(2**31 - 1, (), device=x.device, dtype=torch.int32)
            return torch.where(kept(x, self.p, seed), x * (1 / (1 - self.p)), 0.0)
        return super().forward(x)


def kept(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Which numbers of x stay, all but a share p of them; a function of the seed and of where they stand."""
    hashed = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape) ^ seed
    for shift, factor in MIXERS:
        hashed = (hashed ^ _right(hashed, shift)) * factor
    hashed = hashed ^ _right(hashed, 16)
    return (hashed & 0x7FFFFFFF) >= int(p * 2**31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Shifted to the right, with zeros from the left."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
