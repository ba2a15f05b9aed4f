"""A faster GELU where torch's erf or tanh dominates.

On a CPU torch computes the derivative element by element; tensor operations are three times as fast. On a GPU, in a
compiled half-precision kernel, erf and tanh take longer than reading and writing the tensor.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.runtime import HALF

Approximate = Literal["none", "tanh"]

FIRST, THIRD = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715  # of 2 · what the tanh is of
LOG2E = math.log2(math.e)
TAIL = 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429  # of erfc, to 1.5e-7 (Hastings 1955)
# log(Φ(y) / Φ(-y)) by odd powers of y, up to the 11th: to 4e-4 below 5, beyond which nothing is left (least squares,
# weighted until the largest error was the smallest)
LOGIT = 1.59467633, 0.0740778944, -0.000587508068, -2.72760193e-05, 1.42412705e-06, -2.01342145e-08
LOGIT2 = tuple(LOG2E * factor for factor in LOGIT)  # the same to base 2


def gelu(x: Tensor, approximate: Approximate = "none") -> Tensor:
    """Return x Φ(x), or its tanh approximation."""
    if x.requires_grad and torch.is_grad_enabled():
        compiling = torch.compiler.is_compiling()
        if compiling and x.is_cuda and x.dtype in HALF:
            out: Tensor = _Quick.apply(x, approximate)
            return out
        if approximate == "none" and x.device.type == "cpu" and not compiling:
            found: Tensor = _Gelu.apply(x)
            return found
    return F.gelu(x, approximate=approximate)


class _Gelu(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.gelu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            found: Tensor = torch.ops.aten.gelu_backward(grad, x)
            return found
        share = torch.erf(x * math.sqrt(0.5)).add_(1).mul_(0.5)  # Φ
        density = torch.square(x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        return share.addcmul_(density, x).mul_(grad)


class _Quick(torch.autograd.Function):
    """GELU by one exponential in fp32; the error is below the rounding of half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: Approximate) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return quick(x, approximate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        y = x.float()
        share, density = _share(y, ctx.approximate)
        return (grad.float() * (share + y * density)).to(x.dtype), None


def quick(x: Tensor, approximate: Approximate) -> Tensor:
    y = x.float()
    if approximate == "tanh":
        return (y * _share(y, approximate)[0]).to(x.dtype)
    square = (y * y).clamp(max=25)
    logit = LOGIT2[-2] + LOGIT2[-1] * square
    for factor in LOGIT2[-3::-1]:
        logit = factor + logit * square
    return (y * _sigmoid(y * logit)).to(x.dtype)


def _share(y: Tensor, approximate: Approximate) -> tuple[Tensor, Tensor]:
    """Return Φ(y), or its tanh approximation, and the derivative."""
    if approximate == "tanh":
        square = y * y
        share = _sigmoid(y * (LOG2E * FIRST + LOG2E * THIRD * square))  # as (1 + tanh) / 2
        return share, share * (1 - share) * (FIRST + 3 * THIRD * square)
    bell = torch.exp2(-0.5 * LOG2E * y * y)
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * y.abs())
    a, b, c, d, e = TAIL
    tail = 0.5 * bell * t * (a + t * (b + t * (c + t * (d + t * e))))
    return torch.where(y < 0, tail, 1 - tail), bell * (1 / math.sqrt(2 * math.pi))


def _sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + 2⁻ˣ) to 1e-6. A GPU computes exp2 and rsqrt by one instruction each; exp and a quotient take
    Triton several."""
    return torch.rsqrt(1 + torch.exp2(-x)).square()
