"""Costs of a part of a model, its linear layers, and the sizes of its cache. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple


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


class Matrix(NamedTuple):
    """A linear layer of a part, by the name of its module: what may have an adapter."""

    name: str
    inputs: int
    outputs: int
    across: bool = False  # its input is the encoder's output
    rows: int | None = None  # vectors that it reads in a pass; None: the tokens
    bias: bool = False

    def under(self, place: str) -> "Matrix":
        """Return the matrix with its name within another module."""
        return self._replace(name=f"{place}.{self.name}")


def linear_costs(matrices: Iterable[Matrix], rows: int, source_rows: int = 0) -> Cost:
    """Return the cost of linear layers for a number of tokens; what they save is counted elsewhere."""
    total = Cost()
    for matrix in matrices:
        read = matrix.rows or (source_rows if matrix.across else rows)
        total += replace(linear(matrix.inputs, matrix.outputs, read, matrix.bias), saved=0)
    return total


class Sizes(NamedTuple):
    """Sizes of the cache of one layer per token: key/value heads and their widths."""

    groups: int
    key_width: int
    value_width: int
    reach: int | None = None  # how many tokens back it reads; None: all
    quantisable: bool = False  # may be stored as int8

    def cached(self, b: int, t: int) -> int:
        """Return the number of values stored of t tokens in each of b rows."""
        # what it reaches, the newest, and one slot for padding
        slots = t if self.reach is None else min(t, self.reach + 2)
        return b * slots * self.groups * (self.key_width + self.value_width)


class StateSizes(NamedTuple):
    """Sizes of the cache of one layer per row: a state [h, k, v], and the inputs of a convolution."""

    heads: int
    key_width: int
    value_width: int
    channels: int = 0  # of the convolution
    tail: int = 0  # tokens before the one at hand that the convolution reads
    reach: None = None  # it is in no ring
