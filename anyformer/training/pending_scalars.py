"""Numbers of a step that are read while the device works on the next one."""

from typing import NamedTuple

import torch
from torch import Tensor


class PendingScalars(NamedTuple):
    """Numbers on their way from the device."""

    kept: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, x: Tensor) -> "PendingScalars":
        if not x.is_cuda:
            return cls(x, None)
        kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        kept.copy_(x, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(kept, arrived)

    def read(self) -> list[float]:
        """Waits for the step that they are of, and for no later one."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[float] = self.kept.tolist()
        return found
