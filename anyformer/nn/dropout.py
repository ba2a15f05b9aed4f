"""Dropout that costs nothing where nothing is dropped, and little where something is."""

import numpy as np
import torch
from torch import Tensor, nn

LEVELS = 2**16  # of what chance says of a number on a CPU
MANY = 2**12  # numbers, from which on it pays
MIXERS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))  # a hash of 32 bits (Wellons 2018)


class Dropout(nn.Dropout):
    """torch's, without starting a kernel in evaluation: a decode step of a small model is made of such starts.

    Its random numbers take longer than all else that is done to a tensor in passing. In compiled training on a GPU a
    hash of each place and one random number decides, on a CPU 16 bits of a generator that is begun with one.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x
        if torch.compiler.is_compiling() and x.is_cuda and x.numel() < 2**31:
            seed = torch.randint(2**31 - 1, (), device=x.device, dtype=torch.int32)
            return torch.where(kept(x, self.p, seed), x * (1 / (1 - self.p)), 0.0)
        if self.p < 1 and type(x) is Tensor and x.device.type == "cpu" and x.numel() >= MANY and not _traced():
            return x * noise(x, self.p)
        return super().forward(x)


def _traced() -> bool:
    """Whether what is seen is not what is computed."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def noise(x: Tensor, p: float) -> Tensor:
    """0 for a share p of numbers (to 8e-6), for the others 1/(1-p)."""
    dropped = round(p * LEVELS)
    drawn = np.random.SFC64(int(torch.randint(2**63 - 1, ()))).random_raw(-(-x.numel() // 4)).view(np.uint16)
    stays = torch.from_numpy(drawn[: x.numel()] >= dropped).view(x.shape)
    return stays.to(x.dtype).mul_(1 / (1 - p))


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
