"""Linear layers: torch's, but for how one row is multiplied on a GPU, and several of one input in one product."""

from torch import Tensor, nn

from anyformer.kernels.matmul import linear


class Linear(nn.Linear):
    """x Wᵀ + b"""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Fused(Linear):
    """Several linear maps of one input as one product: rows of the weight are the parts one after the other."""

    def __init__(self, width: int, parts: tuple[int, ...], bias: bool):
        super().__init__(width, sum(parts), bias=bias)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(x).split(self.parts, dim=-1)

    def rows(self, part: int) -> Tensor:
        """The weight of one of the maps."""
        return self.weight.split(self.parts)[part]

    def acting(self, part: int) -> Tensor:
        """The same with whatever stands beside it."""
        return self.rows(part)


def split(x: Tensor, heads: int) -> Tensor:
    """[b, t, h·k] -> [b, h, t, k]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
