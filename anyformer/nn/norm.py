"""Norms over the last axis."""

from typing import assert_never

import torch
from torch import Tensor, nn

from anyformer.config import LayerNorm, NoNorm, Norm, RMSNorm


class RootMeanSquare(nn.Module):
    """x / sqrt(E[x²] + eps) · (offset + γ), computed in fp32 (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float, offset: float, cast_first: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps, self.offset, self.cast_first = eps, offset, cast_first

    def forward(self, x: Tensor) -> Tensor:
        y = at_least_fp32(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight + self.offset if self.offset else self.weight
        # in low precision the two orders round differently, and public families differ
        return y.to(x.dtype) * weight if self.cast_first else (y * at_least_fp32(weight)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}"


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def build_norm(spec: Norm, width: int) -> nn.Module:
    match spec:
        case NoNorm():
            return nn.Identity()
        case LayerNorm(eps=eps, bias=bias):
            return nn.LayerNorm(width, eps=eps, bias=bias)
        case RMSNorm(eps=eps, offset=offset, cast=cast):
            return RootMeanSquare(width, eps, offset, cast == "before_scale")
        case _:
            assert_never(spec)
