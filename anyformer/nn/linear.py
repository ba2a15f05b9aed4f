"""Linear layers: a shape (one map of the input, or several in one matmul) times a weight format.

A plain layer multiplies by its parameter. Another `WeightFormat` stores the weight differently (8 or 4 bits) or
multiplies by it differently (fp8). A low-rank adapter adds its output to that of any format.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import LoRA
from anyformer.nn.lora import LowRank


class WeightFormat(nn.Module, ABC):
    """How a matmul reads a weight that is not a plain parameter."""

    @abstractmethod
    def matmul(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b. `weight` is the layer's parameter, or None if the format stores the weight."""

    def dense(self, rows: slice = slice(None)) -> Tensor:
        """Return rows of the weight that the format stores, as plain values."""
        raise NotImplementedError(f"{type(self).__name__} cannot return its weight")


class Linear(nn.Module):
    """x Wᵀ + b. Several `outputs` are parts of one matmul: the rows of W are theirs, one part after the other."""

    weight: nn.Parameter | None  # None: the format stores it
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int | tuple[int, ...], bias: bool = True):
        super().__init__()
        self.parts = (outputs,) if isinstance(outputs, int) else outputs
        self.in_features, self.out_features = inputs, sum(self.parts)
        self.weight = nn.Parameter(torch.empty(self.out_features, inputs))
        self.bias = nn.Parameter(torch.empty(self.out_features)) if bias else None
        self.format: WeightFormat | None = None  # None: plain
        self.lora: LowRank | None = None
        for parameter in self.parameters():  # as `nn.Linear`, for a layer that is used outside a model
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.format is not None:
            y = self.format.matmul(x, self.weight, self.bias)
        else:
            assert self.weight is not None
            y = F.linear(x, self.weight, self.bias)  # [..., in] -> [..., out]
        return y if self.lora is None else y + self.lora(x)

    def split(self, x: Tensor, direct: bool = False) -> tuple[Tensor, ...]:
        """Return the outputs of the parts; `direct`: a kernel reads them as they are, which a faster class may use."""
        return self(x).split(self.parts, dim=-1)

    def rows(self, part: int | None = None) -> Tensor:
        """Return the weight of one part, or of all, without the adapter: a view of the parameter if there is one."""
        if self.weight is not None:
            return self.weight if part is None else self.weight.split(self.parts)[part]
        assert self.format is not None
        start = 0 if part is None else sum(self.parts[:part])
        return self.format.dense(slice(start, None if part is None else start + self.parts[part]))

    def dense(self, part: int) -> Tensor:
        """Return the weight of one part with what the adapter adds to it."""
        rows = self.rows(part)
        return rows if self.lora is None else rows + self.lora.matrix().split(self.parts)[part]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, parts={self.parts}, bias={self.bias is not None}"


def adapt(model: nn.Module, spec: LoRA, names: Collection[str]) -> None:
    """Add low-rank adapters to linear layers, by their names."""
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear), f"{name} is no linear layer"
        layer.lora = LowRank(layer.in_features, layer.out_features, spec)


class OutBranch(nn.Module):
    """The inner module of a sublayer that ends with a linear layer `out`, or with none."""

    out: nn.Module

    def residual_weights(self) -> Iterator[Tensor]:
        if isinstance(self.out, Linear):
            yield self.out.rows()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[b, t, h·k] -> [b, h, t, k]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
