"""Low-rank adapters (Hu et al. 2022): a narrow way beside each linear layer, alone in being trained.

The layers keep the names of their weights, so that a model with adapters takes those of one without.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import LoRA
from anyformer.nn.dropout import Dropout
from anyformer.nn.linear import Fused, Linear


class LowRank(nn.Module):
    """alpha/rank · B A x"""

    def __init__(self, inputs: int, outputs: int, spec: LoRA):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(spec.rank, inputs)), nn.Parameter(torch.empty(outputs, spec.rank))
        self.dropout, self.scale = Dropout(spec.dropout), spec.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(self.dropout(x), self.a) * self.scale, self.b)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """What is added to W."""
        return self.scale * (self.b.to(dtype) @ self.a.to(dtype))

    def reset(self) -> None:
        """So that B A = 0."""
        self.a.normal_(std=self.a.shape[1] ** -0.5)
        self.b.zero_()


class AdaptedLinear(Linear):
    """A linear layer with a low-rank one beside it."""

    def __init__(self, plain: nn.Linear, spec: LoRA):
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.lora = LowRank(plain.in_features, plain.out_features, spec)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora(x)


class AdaptedFused(Fused):
    """Several linear maps of one input, and a low-rank one beside them all."""

    def __init__(self, plain: Fused, spec: LoRA):
        super().__init__(plain.in_features, plain.parts, bias=plain.bias is not None)
        self.lora = LowRank(plain.in_features, plain.out_features, spec)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (Linear.forward(self, x) + self.lora(x)).split(self.parts, dim=-1)

    def acting(self, part: int) -> Tensor:
        return self.rows(part) + self.lora.matrix().split(self.parts)[part]


def adapt(model: nn.Module, spec: LoRA, names: Collection[str]) -> None:
    """Puts adapters beside linear layers, by their names."""
    for name in names:
        plain = model.get_submodule(name)
        assert isinstance(plain, nn.Linear), f"{name} is no linear layer"
        model.set_submodule(name, AdaptedFused(plain, spec) if isinstance(plain, Fused) else AdaptedLinear(plain, spec))
