"""Linear layer whose output is split into parts, in compiled half-precision training.

The gradients of the parts become one matrix, and its column sums are the gradient of the bias: one kernel does both,
where the compiler takes two passes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.fused_activation import STEP, TALL, WIDE, block_sums
from anyformer.kernels.runtime import Runtime, with_unit_stride

MAX_PARTS = 3


def split_linear(x: Tensor, weight: Tensor, bias: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the parts of x weightᵀ + bias in half precision; x is [..., k], weight [n, k], bias [n]."""
    dtype = Runtime.of(x, training=True).dtype
    with torch.autocast(x.device.type, enabled=False):
        found: tuple[Tensor, ...] = _Joined.apply(x.to(dtype), weight.to(dtype), bias.to(dtype), parts)
        return found


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return tuple(F.linear(x, weight, bias).split(parts, dim=-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, sums = join_gradients([part.flatten(0, -2) for part in gradients])
        dx = (dy @ weight).view_as(x)
        return dx, dy.T @ x.flatten(0, -2), sums.sum(0).to(weight.dtype), None


@torch.library.custom_op("anyformer::join_gradients", mutates_args=())
def join_gradients(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return matrices [m, n_i] side by side [m, n], and its sums over blocks of TALL rows [blocks, n]."""
    return (launch if parts[0].is_cuda else reference)(parts)


@join_gradients.register_fake
def _like(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    m, n = parts[0].shape[0], sum(part.shape[1] for part in parts)
    return parts[0].new_empty(m, n), parts[0].new_empty(-(-m // TALL), n, dtype=torch.float32)


def reference(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    joined = torch.cat(parts, dim=1)
    return joined, block_sums(joined.float())


def launch(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel that equals `reference`."""
    from anyformer.kernels.triton_kernels import join_parts_and_sum

    out, sums = _like(parts)
    m, widths, none = len(out), [part.shape[1] for part in parts], MAX_PARTS - len(parts)
    given = [with_unit_stride(part) for part in parts] + none * parts[:1]
    join_parts_and_sum[(-(-m // TALL), sum(-(-width // WIDE) for width in widths))](
        *given, out, sums, m, *(part.stride(0) for part in given), *widths, *none * [0],
        TALL=TALL, STEP=STEP, WIDE=WIDE, STAGES=3, num_warps=4,
    )  # fmt: skip
    return out, sums
