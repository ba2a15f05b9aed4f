"""Tokens that were chosen on the device and are read by the host one step later, while the next step runs."""

import numpy as np
import torch
from torch import Tensor

from anyformer.generation.engine.request import Generation


class Readback:
    """A choice on its way to the host: ids, and whether their logits were finite, int [2, n]."""

    def __init__(self, both: Tensor):
        self._event: torch.cuda.Event | None = None
        self._host = both
        if both.is_cuda:
            self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, and whether their logits were finite."""
        if self._event is not None:
            self._event.synchronize()
        ids, ok = self._host.numpy()
        return ids, ok != 0


def can_wait(generation: Generation) -> bool:
    """Return whether the next token can be chosen before the host knows the newest one."""
    strategy, plain = generation.strategy, generation.constraint is None and generation.top is None
    return plain and generation.max_new_tokens > 0 and strategy.streams and not strategy.reads_tokens
