"""Learning-rate schedules: the factor on the peak rate at each step, counted from 1."""

import math
from bisect import bisect_left
from typing import assert_never

from anyformer.recipe import WSD, Constant, Cosine, InverseSqrt, Linear, Schedule


def lr_factor(schedule: Schedule, step: float, steps: int) -> float:
    """Return the factor on the peak learning rate at `step` of `steps`; by time it may lie between two (`pace.py`)."""
    warmup = schedule.warmup
    if step <= warmup:
        return step / warmup
    begin, end = _cycle(schedule, step, steps)
    done = (step - max(begin, warmup)) / max(1, end - max(begin, warmup))  # share of the steps after the warm-up
    match schedule:
        case Constant():
            return 1.0
        case Linear(floor=floor):
            return 1 - (1 - floor) * done
        case Cosine(floor=floor):
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        case InverseSqrt():
            return math.sqrt(warmup / step)
        case WSD(decay=decay, floor=floor):
            start = max(warmup, steps * (1 - decay))  # a long warm-up shortens the decay, without a jump
            return 1.0 if step <= start else 1 - (1 - floor) * (step - start) / (steps - start)
        case _:
            assert_never(schedule)


def cycle_ends(schedule: Schedule, steps: int) -> list[int]:
    """Return where the cycles of a schedule end; the last one ends with the last step."""
    cycles = schedule.cycles if isinstance(schedule, Cosine) else 1
    return [round(steps * (2**number - 1) / (2**cycles - 1)) for number in range(1, cycles + 1)]


def _cycle(schedule: Schedule, step: float, steps: int) -> tuple[int, int]:
    """Return the beginning and the end of the cycle that a step is in."""
    ends = cycle_ends(schedule, steps)
    number = min(bisect_left(ends, step), len(ends) - 1)
    return ends[number - 1] if number else 0, ends[number]
