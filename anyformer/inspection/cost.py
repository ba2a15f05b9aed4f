"""Cost of a part of a model, and of a linear layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Parameters, FLOPs, and the number of values saved for the backward pass and stored in the cache."""

    parameters: int = 0
    flops: int = 0
    saved: int = 0
    cached: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.parameters + other.parameters,
            self.flops + other.flops,
            self.saved + other.saved,
            self.cached + other.cached,
        )

    def times(self, count: int, own: int) -> "Cost":
        """Return the cost of `count` layers, `own` of which have separate weights."""
        return Cost(self.parameters * own, self.flops * count, self.saved * count, self.cached * count)


def linear(inputs: int, outputs: int, rows: int, bias: bool) -> Cost:
    """Return the cost of a linear layer for a number of rows."""
    return Cost((inputs + bias) * outputs, 2 * rows * inputs * outputs, saved=rows * inputs)
