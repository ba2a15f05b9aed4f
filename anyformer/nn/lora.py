"""Low-rank adapters (Hu et al. 2022): a narrow path parallel to a linear layer; in training only adapters learn.

The layer keeps the name of its weight, so a model with adapters loads the weights of one without.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import LoRA


class LowRank(nn.Module):
    """alpha/rank · B A x"""

    def __init__(self, inputs: int, outputs: int, spec: LoRA):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(spec.rank, inputs)), nn.Parameter(torch.empty(outputs, spec.rank))
        self.dropout, self.scale = nn.Dropout(spec.dropout), spec.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(self.dropout(x), self.a) * self.scale, self.b)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return alpha/rank · B A, which is added to W."""
        return self.scale * (self.b.to(dtype) @ self.a.to(dtype))

    def reset(self) -> None:
        """Draw A and set B = 0, so that B A = 0."""
        self.a.normal_(std=self.a.shape[1] ** -0.5)
        self.b.zero_()
