"""Matmuls of training in fp8 (Micikevicius et al. 2022): e4m3 in the forward pass, e5m2 for gradients.

    y = x Wᵀ      dx = dy W      dW = dyᵀ x

Each operand is first scaled to the range of its type: x ≈ s · x₈ with s = max|x| / largest value of the type. Each row
of an operand has its own scale. So the largest value of a batch affects the rounding of its own row only, and a kernel
that writes a row (a norm, an activation) can write it in fp8 in the same pass. dW would need another scale for each
column, so it stays in the precision of its operands. Sums use the hardware's fast accumulation: the rounding of
operands with 3 or 4 bits of mantissa is coarser.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from anyformer.kernels import matmul
from anyformer.kernels.fp8 import E4M3, E5M2, activation_backward_fp8, to_fp8
from anyformer.kernels.fused_activation import Act, activate
from anyformer.kernels.private import LONG_ROW, scaled_matmul
from anyformer.kernels.runtime import Runtime
from anyformer.nn.linear import Linear
from anyformer.nn.transforms.substitute import FusedFormat

SIZE_MULTIPLE = 16  # the hardware multiplies matrices of such sizes
MIN_CAPABILITY = (8, 9)  # the first CUDA compute capability with fp8 units


def multiply(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return a bᵀ + bias [m, n] for a [m, k] and b [n, k], each in fp8 with its scales."""
    (x, x_scale), (y, y_scale) = a, b
    return scaled_matmul(x, y, x_scale, y_scale, bias, dtype)


@torch.library.custom_op("anyformer::transpose", mutates_args=())
def transpose(x: Tensor) -> Tensor:
    """Return xᵀ as a contiguous matrix. The operator is opaque to the compiler, which would store fp8 byte by byte
    across rows; Triton gets that wrong at times (triton-lang/triton#11111)."""
    return x.t().contiguous()


@transpose.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])


class Float8Matmul(torch.autograd.Function):
    """x weightᵀ + bias [m, n] for x [m, k] and weight [n, k]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(to_fp8(x, E4M3), to_fp8(weight, E4M3), x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = multiply(to_fp8(dy.contiguous(), E5M2), to_fp8(transpose(weight), E4M3), x.dtype) if needs_x else None
        return dx, dy.t() @ x if needs_weight else None, dy.sum(0) if needs_bias else None


class Float8Activated(torch.autograd.Function):
    """act(x weightᵀ + bias) [m, n] for x [m, k] and weight [n, k]: one pass computes the gradients of the matmul's
    output in both precisions, and that of the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, act: Act) -> Tensor:
        made = multiply(to_fp8(x, E4M3), to_fp8(weight, E4M3), x.dtype, bias)
        ctx.save_for_backward(x, weight, made)
        ctx.act = act
        return activate(made, act)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, made = ctx.saved_tensors
        dy, narrow, scales, sums = activation_backward_fp8(slope.contiguous(), made, ctx.act)
        dx = multiply((narrow, scales), to_fp8(transpose(weight), E4M3), x.dtype)
        return dx, dy.t() @ x, sums.sum(0).to(weight.dtype), None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: Act | None = None) -> Tensor:
    """Return the same as `F.linear` in fp8, in the precision of autocast if it is on; with `act`, which needs a bias,
    the activation of it."""
    at = Runtime.of(x, training=True)
    with torch.autocast(at.device, enabled=False):
        operands = x.to(at.dtype).flatten(0, -2), weight.to(at.dtype), None if bias is None else bias.to(at.dtype)
        y = Float8Matmul.apply(*operands) if act is None else Float8Activated.apply(*operands, act)
        return cast(Tensor, y).unflatten(0, x.shape[:-1])


class Float8Format(FusedFormat):
    """A parameter that is multiplied in fp8 in training, and plainly otherwise."""

    def matmul(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return linear(x, weight, bias) if self.training else matmul.linear(x, weight, bias)

    def fuses_activation(self, outputs: int) -> bool:
        return outputs <= LONG_ROW  # a program keeps a row in registers

    def activated(self, x: Tensor, weight: Tensor, bias: Tensor, act: Act) -> Tensor:
        return linear(x, weight, bias, act)


def learn_in_fp8(stacks: nn.Module) -> tuple[list[str], list[str]]:
    """Give linear layers the fp8 format. Return the names of those that have it, and of those of unfit sizes.

    Routers (`nn.Linear`) stay plain, because they choose by small differences. Adapters compute as without fp8.
    """
    converted: list[str] = []
    unfit: list[str] = []
    for name, module in list(stacks.named_modules()):
        if isinstance(module, Linear):
            fits = module.in_features % SIZE_MULTIPLE == module.out_features % SIZE_MULTIPLE == 0
            module.format = Float8Format() if fits else None
            (converted if fits else unfit).append(name)
    return converted, unfit


def is_supported(device: torch.device) -> bool:
    """Return whether the device has fp8 units."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
