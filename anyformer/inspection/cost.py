"""Cost of a part of a model, of a linear layer and of a norm. Imports no torch."""

from dataclasses import dataclass
from typing import assert_never

from anyformer.config import BatchNorm, DynamicTanh, LayerNorm, NoNorm, Norm, RMSNorm


@dataclass(frozen=True)
class Cost:
    """Parameters, FLOPs, and the number of values saved for the backward pass and stored in the cache.

    `states` are values of the cache that are fp32 at least, whatever the data type of the rest.
    """

    parameters: int = 0
    flops: int = 0
    saved: int = 0
    cached: int = 0
    states: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.parameters + other.parameters,
            self.flops + other.flops,
            self.saved + other.saved,
            self.cached + other.cached,
            self.states + other.states,
        )

    def times(self, count: int, own: int) -> "Cost":
        """Return the cost of `count` layers, `own` of which have separate weights."""
        each = (self.flops, self.saved, self.cached, self.states)
        return Cost(self.parameters * own, *(n * count for n in each))


def linear(inputs: int, outputs: int, rows: int, bias: bool) -> Cost:
    """Return the cost of a linear layer for a number of rows."""
    return Cost((inputs + bias) * outputs, 2 * rows * inputs * outputs, saved=rows * inputs)


def norm_cost(spec: Norm, width: int, rows: int) -> Cost:
    """Return the cost of a norm for a number of rows."""
    match spec:
        case NoNorm():
            return Cost()
        case LayerNorm(bias=bias):
            return Cost(width * (1 + bias), saved=rows * width)
        case BatchNorm():
            return Cost(2 * width, saved=rows * width)
        case DynamicTanh():
            return Cost(2 * width + 1, saved=rows * width)
        case RMSNorm():
            return Cost(width, saved=rows * width)
        case _:
            assert_never(spec)
