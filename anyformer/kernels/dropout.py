"""Dropout whose masks are drawn faster than torch's."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyformer.kernels.private import functorch_is_active

LEVELS = 2**16  # resolution of the drop probability on the CPU (16 bits)
MIN_ELEMENTS = 2**12  # from which the faster mask on the CPU pays
MIXERS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))  # a hash of 32 bits (Wellons 2018)


class Dropout(nn.Dropout):
    """`nn.Dropout` that draws its mask faster in training, and launches nothing in evaluation.

    torch's random numbers take longer than the rest of an elementwise kernel. In compiled training on a GPU the mask is
    a hash of each index and one random seed; on a CPU it has 16 bits per element of a generator with a random seed.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.p):
            return x
        if torch.compiler.is_compiling() and x.is_cuda and x.numel() < 2**31:
            return hashed_dropout(x, self.p, torch.randint(2**31 - 1, (), device=x.device, dtype=torch.int32))
        if self.p < 1 and type(x) is Tensor and x.device.type == "cpu" and x.numel() >= MIN_ELEMENTS and not _traced():
            return x * noise(x, self.p)
        return super().forward(x)


def _traced() -> bool:
    """Return whether torch.compile or a functorch transform is tracing."""
    return torch.compiler.is_compiling() or functorch_is_active()


def noise(x: Tensor, p: float) -> Tensor:
    """Return the multipliers of x: 0 with probability p (to within 8e-6), else 1/(1-p)."""
    dropped = round(p * LEVELS)
    drawn = np.random.SFC64(int(torch.randint(2**63 - 1, ()))).random_raw(-(-x.numel() // 4)).view(np.uint16)
    keep = torch.from_numpy(drawn[: x.numel()] >= dropped).view(x.shape)
    return keep.to(x.dtype).mul_(1 / (1 - p))


def hashed_dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Drop elements by the hash of `keep_mask`."""
    if functorch_is_active():  # for which a custom function has no rules
        return _drop(x, keep_mask(x, p, seed), p)
    found: Tensor = _HashedDropout.apply(x, p, seed)
    return found


class _HashedDropout(torch.autograd.Function):
    """Dropout that computes its mask again in the backward pass. The compiler would store it, a byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        return _drop(x, keep_mask(x, p, seed), p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (seed,) = ctx.saved_tensors
        # of a vector: the compiler would take an expression equal to the forward pass's from there
        mask = keep_mask(grad.new_empty(grad.numel()), ctx.p, seed).view(grad.shape)
        return _drop(grad, mask, ctx.p), None, None


def _drop(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.where(mask, x * (1 / (1 - p)), 0.0)


def keep_mask(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Return the boolean keep-mask of x, a hash of seed and index; each element is dropped with probability p."""
    hashed = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape) ^ seed
    for shift, factor in MIXERS:
        hashed = (hashed ^ _right(hashed, shift)) * factor
    hashed = hashed ^ _right(hashed, 16)
    return (hashed & 0x7FFFFFFF) >= int(p * 2**31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
