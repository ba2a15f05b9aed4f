"""Tokens that were chosen on the device and are read by the host one step later, while the next step runs."""

from collections.abc import Sequence as List

import torch

from anyformer.decoding.sampling import Choice
from anyformer.decoding.strategy import Sampling
from anyformer.serve.sequence import Sequence


class Readback:
    """The choice of one step, on its way to the host."""

    def __init__(self, sequences: List[Sequence], chosen: Choice):
        self.sequences, self.ids = sequences, chosen.ids
        self.index = {id(sequence): i for i, sequence in enumerate(sequences)}
        both = torch.stack((chosen.ids, chosen.ok.long()))
        self._event: torch.cuda.Event | None = None
        self._host = both
        if both.is_cuda:
            self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        for sequence in sequences:
            sequence.unread = 1

    def newest(self, sequence: Sequence) -> int:
        """Return the newest token of a request, or -i - 1 if it is ids[i], which the host does not know."""
        i = self.index.get(id(sequence))
        return sequence.answer[-1] if i is None else -i - 1

    def wait(self) -> tuple[list[int], list[int]]:
        """Return the ids, and whether their logits were finite."""
        if self._event is not None:
            self._event.synchronize()
        ids, ok = self._host.tolist()
        for sequence in self.sequences:
            sequence.unread = 0
        return ids, ok


def can_wait(sequence: Sequence) -> bool:
    """Return whether the next token can be chosen before the host knows the newest one."""
    generation, strategy = sequence.generation, sequence.generation.strategy
    if not isinstance(strategy, Sampling) or generation.constraint is not None or generation.top is not None:
        return False
    plain = Sampling(
        temperature=strategy.temperature,
        top_k=strategy.top_k,
        top_p=strategy.top_p,
        min_p=strategy.min_p,
        typical_p=strategy.typical_p,
    )
    return plain == strategy
