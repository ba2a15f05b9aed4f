"""The number of CPU threads of a training step.

A small step is launch-bound: a second thread gains little on an idle machine, and beside another busy process the
threads wait for each other. On two cores (Neoverse-N1) a step of the recipe `sort`, 0.4 GFLOP, takes 28 ms with one
thread and 29 with two; beside a busy process 33 and 91.

The rule depends on the model and its batch alone, never on a measurement: the bits of a run depend on its threads.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ONE_THREAD_FLOPS = 1e9  # of a step; smaller ones gain at most 15 % from a second thread on an idle machine
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the user's own choice


def choose_threads(flops: float) -> int:
    """Return the number of threads for a step by its FLOPs: 1 if there are few, else torch's default."""
    own = torch.get_num_threads()
    return 1 if flops < ONE_THREAD_FLOPS and may_choose_threads() else own


def may_choose_threads() -> bool:
    """Return whether torch would use several threads, and the user has not set their number."""
    return torch.get_num_threads() > 1 and not any(os.environ.get(name) for name in SETTINGS)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run operations on the CPU with a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
