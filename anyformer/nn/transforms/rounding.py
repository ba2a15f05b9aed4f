"""Weights as integers of 8 or 4 bits: W ≈ s·q, with a scale s for each row or for each group of a row.

Weights are rounded to the nearest multiple of s, so none moves by more than s/2. A scale of a group is a bf16 number:
q·s is then exact in fp32, and rounding it again gives the same q and s.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.cuda_graph import is_for_capture
from anyformer.kernels.expert_matmul import ExpertRows, expert_matmul
from anyformer.kernels.int4 import fits_int4_kernel, has_int4_kernel, int4_linear, interleave
from anyformer.kernels.matmul import (
    MAX_INT8_ROWS,
    RowFusion,
    fits_row_kernel,
    has_row_kernel,
    int8_linear,
    one_row_linear,
)
from anyformer.kernels.runtime import Runtime
from anyformer.nn.transforms.substitute import FusedFormat

Bits = Literal[8, 4]
MAX_INTEGER = {8: 119, 4: 7}  # the largest |q|; 8 bits stop at 16·7 + 7, which two integers of 4 bits represent
GROUP_SIZE = 32  # weights that share a scale by default


class Rounded(NamedTuple):
    """A matrix, or a stack of matrices, as integers and their scales."""

    q: Tensor  # int8 [..., out, n, g]: n groups of g integers, the last group padded with 0
    scale: Tensor  # [..., out, n]: bf16 for groups, as the Arm kernel requires, fp32 for rows
    width: int  # number of integers in a row without padding
    bits: Bits

    def dense(self) -> Tensor:
        """Return W in fp32, [..., out, in]"""
        return _dequantise(self.q, self.scale, self.width)


def round_off(weight: Tensor, bits: Bits, group: int | None = None) -> Rounded:
    """Round weights to multiples of a scale, by which the largest of a row or group is the largest integer."""
    width = weight.shape[-1]
    size = group or width
    groups = F.pad(weight.float(), (0, -width % size)).unflatten(-1, (-1, size))
    scale = groups.abs().amax(dim=-1) / MAX_INTEGER[bits]
    if group is not None:
        scale = scale.bfloat16()
    scale = scale.where(scale > 0, 1.0)  # all zeros
    q = (groups / scale.float()[..., None]).round().clamp(-MAX_INTEGER[bits], MAX_INTEGER[bits])
    return Rounded(q.to(torch.int8), scale, width, bits)


def _dequantise(q: Tensor, scale: Tensor, width: int) -> Tensor:
    return (q * scale.float()[..., None]).flatten(-2)[..., :width]


def pack_nibbles(q: Tensor) -> Tensor:
    """Store integers from -8 to 7 two to a byte, the first one in its lower half."""
    low, high = (q + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the two 4-bit values of each byte, from -8 to 7."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8) - 8


# -- the format -------------------------------------------------------------------------------------------------------


class RoundedFormat(FusedFormat):
    """Integers and scales of one linear layer, or of the stacked layers of experts.

    Each matmul dequantises them, except for few rows on a GPU, whose kernels read the integers.
    """

    q: Tensor
    scale: Tensor

    def __init__(self, rounded: Rounded, dtype: torch.dtype):
        super().__init__()
        self.bits, self.width, self.dtype = rounded.bits, rounded.width, dtype
        self.register_buffer("q", interleave(pack_nibbles(rounded.q)) if rounded.bits == 4 else rounded.q)
        self.register_buffer("scale", rounded.scale)

    @property
    def scales_rows(self) -> bool:
        """True if a row has one scale, which can be applied after the matmul."""
        return self.scale.dtype is torch.float32

    def matmul(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.scales_rows:
            return self._matmul_then_scale(x, bias)
        if self.bits == 4 and fits_int4_kernel(x, self.q):
            return int4_linear(x, self.q, self.scale, bias)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return F.linear(x, self.dense(), bias)
        at = Runtime.of(x, training=True)
        with torch.autocast(at.device, enabled=False):
            bias = None if bias is None else bias.to(at.dtype)
            y: Tensor = _FrozenMatmul.apply(x.to(at.dtype), bias, self.q, self.scale, self.width, self.bits)
            return y

    def _matmul_then_scale(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the integers, then by the scale of each row. In fp16 the first result may overflow."""
        q, scale = self.q[:, 0], self.scale[:, 0]
        if fits_row_kernel(x, q):
            return one_row_linear(x, q, scale, bias)
        if fits_row_kernel(x, q, MAX_INT8_ROWS):
            return int8_linear(x, q, scale, bias)
        if Runtime.of(x, training=False).dtype is torch.float16:
            return F.linear(x, self.dense(), bias)
        y = F.linear(x, q.to(self.dtype))
        y = (y * scale).to(y.dtype)
        return y if bias is None else y + bias

    def has_row_kernel(self, dtype: torch.dtype) -> bool:
        if self.scales_rows:
            return has_row_kernel(self.q[:, 0], dtype)
        return self.bits == 4 and has_int4_kernel(self.q, self.width)

    def fused_row(self, x: Tensor, bias: Tensor | None, fusion: RowFusion) -> Tensor:
        if self.scales_rows:
            return one_row_linear(x, self.q[:, 0], self.scale[:, 0], bias, *fusion)
        return int4_linear(x, self.q, self.scale, bias, *fusion)

    def expert_matmul(self, x: Tensor, rows: ExpertRows) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            y: Tensor = _FrozenExpertMatmul.apply(x, *rows, self.q, self.scale, self.width, self.bits)
            return y
        if torch.compiler.is_compiling() or is_for_capture():  # then the host cannot read lengths
            return expert_matmul(x, self.dense().to(x.dtype), rows)
        pieces = enumerate(x.split(rows.lengths.tolist()))
        return torch.cat([piece @ self.dense(i).to(x.dtype).mT for i, piece in pieces if len(piece)])

    def dense(self, rows: slice | int = slice(None)) -> Tensor:
        """Return some rows of W, or one matrix of a stack."""
        return _unrounded(self.q[rows], self.scale[rows], self.width, self.bits).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{list(self.scale.shape[:-1])} x {self.width}, bits={self.bits}"


def _unrounded(q: Tensor, scale: Tensor, width: int, bits: int) -> Tensor:
    return _dequantise(unpack_nibbles(interleave(q)) if bits == 4 else q, scale, width)


class _FrozenMatmul(torch.autograd.Function):
    """x Wᵀ + b; both passes dequantise W, so only its integers are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, q: Tensor, scale: Tensor, width: int, bits: int) -> Tensor:
        ctx.save_for_backward(q, scale)
        ctx.sizes = width, bits
        return F.linear(x, _unrounded(q, scale, width, bits).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_bias, *_ = ctx.needs_input_grad
        dx = dy @ _unrounded(*ctx.saved_tensors, *ctx.sizes).to(dy.dtype) if needs_x else None
        return dx, dy.flatten(0, -2).sum(0) if needs_bias else None, None, None, None, None


class _FrozenExpertMatmul(torch.autograd.Function):
    """x W_eᵀ for each row of x and its expert e; both passes dequantise W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, experts: Tensor, lengths: Tensor, q: Tensor, scale: Tensor, width: int, bits: int
    ) -> Tensor:
        ctx.save_for_backward(experts, lengths, q, scale)
        ctx.sizes = width, bits
        return expert_matmul(x, _unrounded(q, scale, width, bits).to(x.dtype), ExpertRows(experts, lengths))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        experts, lengths, q, scale = ctx.saved_tensors
        weight = _unrounded(q, scale, *ctx.sizes).to(dy.dtype)
        return expert_matmul(dy, weight.mT, ExpertRows(experts, lengths)), *[None] * 6
