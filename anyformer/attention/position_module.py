"""Position schemes as modules that hold their learned tables. The mathematics is in `config/position.py`."""

import torch
from torch import Tensor, nn

from anyformer.config import Position, Relative


class Positions(nn.Module):
    """One scheme with its learned tables, owned by a stack."""

    def __init__(self, scheme: Position, width: int, heads: int):
        super().__init__()
        self.scheme = scheme
        self.heads = heads
        self.biases, self.relates = scheme.biases(), scheme.reads_content()
        shapes = scheme.tables(width, heads)
        self.tables = nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})

    def _read(self) -> dict[str, Tensor]:
        return dict(self.tables.items())

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.scheme.embed(x, positions, self._read())

    def levels(self, causal: bool, device: torch.device) -> Tensor | None:
        return self.scheme.levels(self.heads, causal, self._read(), device)

    def bias(self, q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
        return self.scheme.bias(q, k, self.heads, causal, self._read()) if self.biases else None

    def relative(self, q: Tensor, k: Tensor) -> Relative | None:
        return self.scheme.relative(q, k, self._read()) if self.relates else None

    def extra_repr(self) -> str:
        return repr(self.scheme)
