"""Triton kernels of evaluation that read and write each element once: a norm, and the two halves of a gated network."""

import triton
import triton.language as tl


@triton.jit
def norm_rows(x, weight, out, stride, width, eps, WIDE: tl.constexpr):
    """Divide a row by the root of its mean square, round it, and multiply it by the weights."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = at < width
    y = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / width + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    rounded = y.to(out.dtype.element_ty).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row * width + at, rounded.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(gate, up, out, gate_stride, up_stride, width, WIDE: tl.constexpr):
    """Multiply SiLU of the gate, rounded, by the other half."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = at < width
    x = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    opened = (x / (1.0 + tl.exp(-x))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (opened * y).to(out.dtype.element_ty), mask=inside)
