"""Norms of compiled training in bf16, with an fp32 residual stream: smaller tensors are saved for the backward pass."""

from typing import Any

import torch
from torch import Tensor

from anyformer.kernels.runtime import Runtime, in_compiled_half_step

BF16_NAN = 0x7FC0


def is_narrow_step(x: Tensor) -> bool:
    """Return whether x is an fp32 residual stream in a compiled training step in bf16."""
    narrow = x.dtype is torch.float32 and in_compiled_half_step(x)
    return narrow and Runtime.of(x, training=True).dtype is torch.bfloat16


def narrow_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """Return the norm of x over its last axis, `centred` or not, as `_Narrow` computes it."""
    found: Tensor = _Narrow.apply(x, weight, bias, eps, centred)
    return found


class _Narrow(torch.autograd.Function):
    """Norm that rounds the normalised x to bf16, as matmuls round their inputs.

    The backward pass, and a residual sum after the norm, then read two bytes per element. The compiler would write and
    read fp32, which takes longer than the rest of the norm.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
        if centred:
            variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            scale = torch.rsqrt(variance + eps)
            made = (x - mean) * scale
        else:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            made = x * scale
        short = _shortened(made)
        ctx.save_for_backward(short, scale, weight)
        ctx.biased, ctx.centred = bias is not None, centred
        made = _lengthened(short)
        return made * weight if bias is None else made * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        short, scale, weight = ctx.saved_tensors
        made, slope, rows = _lengthened(short), grad * weight, tuple(range(grad.dim() - 1))
        share = 1 / grad.shape[-1]
        dx = slope - made * ((slope * made).sum(-1, keepdim=True) * share)
        if ctx.centred:
            dx = dx - slope.sum(-1, keepdim=True) * share
        return dx * scale, (grad * made).sum(rows), grad.sum(rows) if ctx.biased else None, None, None


def _shortened(x: Tensor) -> Tensor:
    """Round fp32 to bf16, stored as int16, by integer operations that the compiler does not remove.

    The NaN of a GPU, 0x7fffffff, would overflow to -0.
    """
    rounded = (x.view(torch.int32) + (1 << 15)) >> 16
    return torch.where(x.isnan(), BF16_NAN, rounded).to(torch.int16)


def _lengthened(short: Tensor) -> Tensor:
    return (short.to(torch.int32) << 16).view(torch.float32)
