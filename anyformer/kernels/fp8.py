"""Casts to fp8 with one scale for each row: x ≈ s · x₈ with s = max|x| / largest value of the type."""

import torch
from torch import Tensor

from anyformer.kernels import fused_activation
from anyformer.kernels.conventions import next_power_of_two

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_ABSMAX = 1e-12  # rows below it count as zero
TALL, STAGES = 64, 3  # rows that a program passes, and of these in flight; not yet tuned on a GPU
COLUMNS_PER_WARP = 256  # 8 in a thread: loads and stores of two bytes and of one then have the same layout


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [m, k] in fp8, and the scale of each row, [m, 1]."""
    y = x.float()
    bits = y.abs().view(torch.int32).amax(dim=-1, keepdim=True)  # ordered as the values, and NaN is the largest
    scale = bits.view(torch.float32).clamp(min=MIN_ABSMAX) / torch.finfo(dtype).max
    return (y * scale.reciprocal()).to(dtype), scale


@torch.library.custom_op("anyformer::activation_backward_fp8", mutates_args=())
def activation_backward_fp8(slope: Tensor, made: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of an activation's input [m, n], the same in fp8 with its scales, and its sums over blocks of
    TALL rows [blocks, n].

    `slope` is the gradient of its output. The compiler would sum in a second pass: a program reads whole rows for their
    maxima, but not whole columns.
    """
    return (launch if slope.is_cuda else reference)(slope, made, act)


@activation_backward_fp8.register_fake
def _like(slope: Tensor, made: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, n = made.shape
    scales, sums = (made.new_empty(shape, dtype=torch.float32) for shape in ((m, 1), (-(-m // TALL), n)))
    return torch.empty_like(made), torch.empty_like(made, dtype=E5M2), scales, sums


def reference(slope: Tensor, made: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy, sums = fused_activation.reference(slope, made, act, TALL)
    return dy, *to_fp8(dy, E5M2), sums


def launch(slope: Tensor, made: Tensor, act: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the Triton kernel that equals `reference`."""
    from anyformer.kernels.triton_kernels import cast_slopes

    dy, narrow, scales, sums = _like(slope, made, act)
    m, n = made.shape
    wide = next_power_of_two(n) // 2  # the others have another block
    cast_slopes[(-(-m // TALL),)](
        slope, made, dy, narrow, scales, sums, m, MIN_ABSMAX, torch.finfo(E5M2).max,
        N=n, ACT=act, TALL=TALL, WIDE=wide, REST=next_power_of_two(n - wide), STAGES=STAGES,
        num_warps=min(max(wide // COLUMNS_PER_WARP, 1), 16),
    )  # fmt: skip
    return dy, narrow, scales, sums
