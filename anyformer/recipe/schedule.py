"""Learning-rate schedules: the factor on the peak rate at each step, counted from 1. Imports no torch."""

import math
from abc import abstractmethod
from bisect import bisect_left
from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Part
from anyformer.config.spec import Count, Fraction, Size

MAX_CYCLES = 8  # the first is then 1/255 of all


class Schedule(Part):
    """A learning rate over the steps: it rises from 0 in a warm-up, and then follows the rule of the schedule."""

    warmup: Count = 0  # steps over which the rate rises from 0

    @abstractmethod
    def factor(self, step: float, steps: int) -> float:
        """Return the factor on the peak learning rate at `step` of `steps`, after the warm-up."""

    def at(self, step: float, steps: int) -> float:
        """Return the factor at any step of `steps`; by time it may lie between two (`training/pace.py`)."""
        return step / self.warmup if step <= self.warmup else self.factor(step, steps)

    def cycle_ends(self, steps: int) -> list[int]:
        """Return the steps at which an evaluation is due because a cycle ends: the last is `steps`."""
        return [steps]


class Constant(Schedule):
    """The peak learning rate, after a warm-up."""

    kind: Literal["constant"] = "constant"

    def factor(self, step: float, steps: int) -> float:
        return 1.0


class LinearDecay(Schedule):
    """Linear decay to `floor` times the peak."""

    kind: Literal["linear"] = "linear"
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0  # last learning rate ÷ peak

    def factor(self, step: float, steps: int) -> float:
        return 1 - (1 - self.floor) * ((step - self.warmup) / max(1, steps - self.warmup))


class Cosine(Schedule):
    """Decay along half a cosine to `floor` times the peak, once or in cycles (Loshchilov & Hutter 2017)."""

    kind: Literal["cosine"] = "cosine"
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.1  # last learning rate ÷ peak
    # each cycle begins at the peak, is twice as long as the one before, and ends with an evaluation
    cycles: Annotated[int, Field(strict=True, ge=1, le=MAX_CYCLES)] = 1

    def factor(self, step: float, steps: int) -> float:
        ends = self.cycle_ends(steps)
        number = min(bisect_left(ends, step), len(ends) - 1)
        begin = max(ends[number - 1] if number else 0, self.warmup)
        done = (step - begin) / max(1, ends[number] - begin)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    def cycle_ends(self, steps: int) -> list[int]:
        return [round(steps * (2**number - 1) / (2**self.cycles - 1)) for number in range(1, self.cycles + 1)]


class InverseSqrt(Schedule):
    """lr · sqrt(warmup / step) after a linear warm-up; lr = (d · warmup)^-0.5 gives that of Vaswani et al. 2017."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup: Size = 4000  # steps over which the rate rises from 0

    def factor(self, step: float, steps: int) -> float:
        return math.sqrt(self.warmup / step)


class WSD(Schedule):
    """Warm-up, a constant rate, and a linear decay over the last fraction `decay` of the steps (WSD)."""

    kind: Literal["wsd"] = "wsd"
    decay: Fraction = 0.2  # fraction of the steps over which the rate falls
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0  # last learning rate ÷ peak

    def factor(self, step: float, steps: int) -> float:
        start = max(self.warmup, steps * (1 - self.decay))  # a long warm-up shortens the decay, without a jump
        return 1.0 if step <= start else 1 - (1 - self.floor) * (step - start) / (steps - start)
