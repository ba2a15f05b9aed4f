"""Tokens that were chosen on the device and are read by the host one step later, while the next step runs."""

from collections.abc import Sequence as List

import torch
from torch import Tensor

from anyformer.decoding.strategy import Sampling
from anyformer.serve.sequence import Sequence


class Readback:
    """The choice of one step, on its way to the host: ids, and whether their logits were finite, int [2, n]."""

    def __init__(self, sequences: List[Sequence], both: Tensor):
        self.sequences, self.ids = sequences, both[0]
        self._event: torch.cuda.Event | None = None
        self._host = both
        if both.is_cuda:
            self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        for sequence in sequences:
            sequence.unread = 1

    def wait(self) -> tuple[list[int], list[int]]:
        """Return the ids, and whether their logits were finite."""
        if self._event is not None:
            self._event.synchronize()
        ids, ok = self._host.tolist()
        for sequence in self.sequences:
            sequence.unread = 0
        return ids, ok


class Unread:
    """Choices that the host has not read yet: those of the last decode step, and of prompts read since."""

    def __init__(self) -> None:
        self.parts: list[Readback] = []

    def add(self, sequences: List[Sequence], chosen: Tensor) -> None:
        """Add choices, int [2, n], of requests."""
        self.parts.append(Readback(sequences, chosen))

    def pop(self) -> list[Readback]:
        parts, self.parts = self.parts, []
        return parts

    def newest(self, sequences: List[Sequence]) -> tuple[list[int], Tensor | None]:
        """Return the newest token of each request, or -i - 1 if it is ids[i], and these ids."""
        if not self.parts:
            return [sequence.answer[-1] for sequence in sequences], None
        if len(self.parts) == 1 and self.parts[0].sequences == sequences:  # as in most steps
            return list(range(-1, -len(sequences) - 1, -1)), self.parts[0].ids
        unread = [id(sequence) for part in self.parts for sequence in part.sequences]
        index = {key: -i - 1 for i, key in enumerate(unread)}
        newest = [index[key] if (key := id(s)) in index else s.answer[-1] for s in sequences]
        return newest, torch.cat([part.ids for part in self.parts])


def can_wait(sequence: Sequence) -> bool:
    """Return whether the next token can be chosen before the host knows the newest one."""
    generation, strategy = sequence.generation, sequence.generation.strategy
    if not isinstance(strategy, Sampling) or generation.constraint is not None or generation.top is not None:
        return False
    if generation.max_new_tokens == 0:
        return False
    plain = Sampling(
        temperature=strategy.temperature,
        top_k=strategy.top_k,
        top_p=strategy.top_p,
        min_p=strategy.min_p,
        typical_p=strategy.typical_p,
    )
    return plain == strategy
