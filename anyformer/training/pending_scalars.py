"""Scalars of a step on their way from the GPU, read while the next step runs."""

from typing import NamedTuple

import torch
from torch import Tensor


class PendingScalars(NamedTuple):
    """Scalars that are being copied to the CPU."""

    values: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, x: Tensor) -> "PendingScalars":
        """Start the copy."""
        if not x.is_cuda:
            return cls(x, None)
        values = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        values.copy_(x, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(values, arrived)

    def read(self) -> list[float]:
        """Return the values. Wait for their own step only, not for later ones."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.values.tolist()
        return values
