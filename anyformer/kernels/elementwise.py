"""Norms and gates of evaluation on a GPU, each by one kernel.

torch takes three kernels for either. Each program computes one row, so that a row's result does not depend on others.
"""

from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.conventions import next_power_of_two
from anyformer.kernels.runtime import runs_fused

MAX_NORM_WIDTH = 16384  # of a row in the registers of one program
GATE_BLOCK = 1024


def can_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether `rms_norm` supports these tensors."""
    return x.dtype is weight.dtype and x.shape[-1] <= MAX_NORM_WIDTH and x.is_contiguous() and x.numel() > 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(E[x²] + eps), rounded, times the weight; x is [..., d] and contiguous."""
    from anyformer.kernels.triton_kernels import norm_rows

    width, out = x.shape[-1], x.new_empty(x.shape)
    wide = next_power_of_two(width)
    warps = max(1, min(16, wide // 512))
    norm_rows[(x.numel() // width,)](x, weight, out, width, width, eps, WIDE=wide, num_warps=warps)
    return out


def can_gate(gate: Tensor, up: Tensor) -> bool:
    """Return whether the kernel of `silu_gate` supports these halves: rows at equal distances, contiguous elements."""
    return gate.dtype is up.dtype and gate.numel() > 0 and all(_has_even_rows(x) for x in (gate, up))


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) ⊙ up of [..., n], which may be parts of one tensor; by one kernel in evaluation on a GPU."""
    if not (gate.is_cuda and runs_fused(gate) and can_gate(gate, up)):
        return F.silu(gate) * up
    from anyformer.kernels.triton_kernels import gate_rows

    width, out = gate.shape[-1], gate.new_empty(gate.shape)
    strides = (x.stride(-2) if x.dim() > 1 else width for x in (gate, up))
    grid = (gate.numel() // width, -(-width // GATE_BLOCK))
    gate_rows[grid](gate, up, out, *strides, width, WIDE=GATE_BLOCK, num_warps=4)
    return out


def _has_even_rows(x: Tensor) -> bool:
    """Return whether the rows [..., n] lie at multiples of one stride."""
    distance = x.stride(-2) if x.dim() > 1 else 0
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if size > 1 and stride != distance:
            return False
        distance *= size
    return x.stride(-1) == 1
