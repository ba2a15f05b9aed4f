"""Linear layer and activation as one op, in compiled half-precision training.

In the backward pass, the gradient of the activation's input is also that of the linear layer's output, and its column
sums are the gradient of the bias: one kernel computes both, where the compiler takes two passes. cuBLAS fuses a ReLU
into the matmul; its derivative follows from its output.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels import private
from anyformer.kernels.gelu import Approximate, quick
from anyformer.kernels.runtime import Runtime

Act = Literal["relu", "gelu", "gelu_tanh"]
APPROXIMATE: dict[str, Approximate] = {"gelu": "none", "gelu_tanh": "tanh"}  # torch's names
TALL, STEP, WIDE = 128, 16, 128  # rows that a program passes, how many at once, and columns; the best of 40 on an H200


def fused_linear_activation(x: Tensor, weight: Tensor, bias: Tensor, act: Act) -> Tensor:
    """Return act(x weightᵀ + bias) in half precision; x is [..., k], weight [n, k], bias [n]."""
    dtype = Runtime.of(x, training=True).dtype
    with torch.autocast(x.device.type, enabled=False):
        found: Tensor = _Activated.apply(x.to(dtype).flatten(0, -2), weight.to(dtype), bias.to(dtype), act)
        return found.unflatten(0, x.shape[:-1])


def activate(made: Tensor, act: Act) -> Tensor:
    """Return an activation of half-precision values, as a compiled training step computes it."""
    return F.relu(made) if act == "relu" else quick(made, APPROXIMATE[act])


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, act: Act) -> Tensor:
        if act == "relu":
            made = out = linear_relu(x, weight, bias)
        else:
            made = F.linear(x, weight, bias)
            out = activate(made, act)
        ctx.save_for_backward(x, weight, made)
        ctx.act = act
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, made = ctx.saved_tensors
        dy, sums = activation_backward(slope.contiguous(), made, ctx.act)
        return dy @ weight, dy.T @ x, sums.sum(0).to(weight.dtype), None


@torch.library.custom_op("anyformer::linear_relu", mutates_args=())
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return max(0, x weightᵀ + bias) by one cuBLAS call, which the compiler would split."""
    return private.linear_relu(x, weight, bias)


@linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])  # not len: any number of rows is one program


@torch.library.custom_op("anyformer::activation_backward", mutates_args=())
def activation_backward(slope: Tensor, made: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of an activation's input [m, n], and its sums over blocks of TALL rows [blocks, n].

    `slope` is the gradient of its output, and `made` its input, or its output for a ReLU.
    """
    return (launch if slope.is_cuda else reference)(slope, made, act)


@activation_backward.register_fake
def _like(slope: Tensor, made: Tensor, act: str) -> tuple[Tensor, Tensor]:
    m, n = made.shape
    return torch.empty_like(made), made.new_empty(-(-m // TALL), n, dtype=torch.float32)


def reference(slope: Tensor, made: Tensor, act: str, tall: int = TALL) -> tuple[Tensor, Tensor]:
    dy, y = slope.float(), made.float()
    found = dy * (y > 0) if act == "relu" else torch.ops.aten.gelu_backward(dy, y, approximate=APPROXIMATE[act])
    return found.to(made.dtype), block_sums(found, tall)


def block_sums(x: Tensor, tall: int = TALL) -> Tensor:
    """Return the sums of fp32 x [m, n] over blocks of `tall` rows [blocks, n]."""
    return F.pad(x, (0, 0, 0, -len(x) % tall)).unflatten(0, (-1, tall)).sum(1)


def launch(slope: Tensor, made: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel that equals `reference`."""
    from anyformer.kernels.triton_kernels import pass_slopes

    out, sums = _like(slope, made, act)
    m, n = made.shape
    pass_slopes[(-(-m // TALL), -(-n // WIDE))](
        slope, made, out, sums, m, n, ACT=act, TALL=TALL, STEP=STEP, WIDE=WIDE, STAGES=3, num_warps=4
    )
    return out, sums
