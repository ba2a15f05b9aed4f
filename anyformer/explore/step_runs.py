"""Runs at the steps of their training, the latest ones in memory: a film shows all of them again and again."""

from collections import OrderedDict
from collections.abc import Callable

import torch

from anyformer.runs.run import Run

MAX_STEP_BYTES = 512 * 2**20  # of the weights of all runs at steps; one is always kept
MAX_WIDENED_BYTES = 64 * 2**20  # of weights in half precision that are computed with in fp32

Key = tuple[str, int]  # name of a run, and a step


class StepRuns:
    """Cache of runs at steps, least recently used first."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Key, Run] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    def get(self, key: Key, load: Callable[[], Run]) -> Run:
        """Return a run at a step; load it, and drop others over the limit, if it is not here."""
        if key not in self._runs:
            self._runs[key] = load()
        self._runs.move_to_end(key)
        while len(self._runs) > 1 and sum(map(_weight_bytes, self._runs.values())) > MAX_STEP_BYTES:
            self._runs.popitem(last=False)
        return self._runs[key]


def widened(run: Run) -> Run:
    """Convert the weights of a small run in half precision to fp32, so that the displayed sums add up."""
    is_half = next(run.model.parameters()).dtype in (torch.float16, torch.bfloat16)
    if is_half and _weight_bytes(run) <= MAX_WIDENED_BYTES:
        run.model.float()
    return run


def _weight_bytes(run: Run) -> int:
    return sum(weight.nbytes for weight in run.model.parameters())
