"""Linear layers of 4-bit weights on one row: their time is the time to read the weights."""

import torch
from torch import Tensor

from anyformer.kernels.matmul import MIN_WEIGHTS, Shape
from anyformer.kernels.opaque import opaque
from anyformer.kernels.runtime import HALF, HAS_TRITON, supports_dependent_launch

COLUMN_BLOCK = 256  # the input width is a multiple of it


def interleave(packed: Tensor) -> Tensor:
    """Transpose every 16 bytes, as a matrix of 4 x 4; doing it again restores them.

    Bytes hold two neighbouring integers. A thread loads 16 bytes as four words, and byte i of all four belongs to eight
    neighbouring elements of x: one load. Rows of another length, which the kernel does not read, stay as they are.
    """
    return packed if packed.shape[-1] % 16 else packed.unflatten(-1, (-1, 4, 4)).mT.flatten(-3)


def fits_int4_kernel(x: Tensor, packed: Tensor) -> bool:
    """Whether the kernel supports a call: one row in half precision on CUDA, without gradients, and whole blocks."""
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dtype in HALF
        and 0 < x.numel() == x.shape[-1] == 2 * packed.shape[1:].numel()
        and x.shape[-1] % COLUMN_BLOCK == 0
        and packed.shape[-1] % 16 == 0
        and 2 * packed.numel() >= MIN_WEIGHTS
        and packed.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
    )


def shape_of(n: int, k: int) -> Shape:
    """Return the tile sizes. Each warp reads 1,024 columns, so that a thread loads its own elements of x."""
    warps = min(4, max(1, k // 1024))
    return Shape(8 if n >= 8192 else 4, 1024 * warps, warps)


def _like(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(packed))


@opaque("int4_linear", _like)
def int4_linear(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias [..., n] of one row x [..., k], with W = scale · q.

    `packed` [n, groups, g / 2] are the integers of `Rounded.q`, packed and interleaved; `scale` is [n, groups].
    """
    out = _like(x, packed, scale, bias)
    launch(x, packed, scale, bias, out, shape_of(len(packed), x.shape[-1]))
    return out


def launch(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor, shape: Shape) -> None:
    """Run the kernel with these tile sizes; the number of columns is reduced to a divisor of the width."""
    import triton.language as tl

    from anyformer.kernels.triton_kernels import multiply_row_int4

    n, k = len(packed), x.shape[-1]
    x = x.contiguous() if x.storage_offset() % 2 == 0 else x.clone()  # read as pairs
    early = supports_dependent_launch(x.device)
    multiply_row_int4[(-(-n // shape.rows),)](
        x.view(-1).view(torch.int32), packed.view(torch.int32), scale, x if bias is None else bias, out, n,
        K=k, GROUP=k // scale.shape[-1], HALF=tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float16,
        BIASED=bias is not None, EARLY=early, PACKED=early, ROWS=shape.rows, COLUMNS=min(shape.columns, k & -k),
        num_warps=shape.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
