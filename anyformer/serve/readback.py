"""Tokens that were chosen on the device and are read by the host one step later, while the next step runs."""

import numpy as np
import torch
from torch import Tensor

from anyformer.decoding.strategy import Sampling
from anyformer.serve.request import Generation


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
    strategy = generation.strategy
    if not isinstance(strategy, Sampling) or generation.constraint is not None or generation.top is not None:
        return False
    return generation.max_new_tokens > 0 and _ignores_answer(strategy)


def _ignores_answer(strategy: Sampling) -> bool:
    plain = Sampling(
        temperature=strategy.temperature,
        top_k=strategy.top_k,
        top_p=strategy.top_p,
        min_p=strategy.min_p,
        typical_p=strategy.typical_p,
    )
    return plain == strategy
