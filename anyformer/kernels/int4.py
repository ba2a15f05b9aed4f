"""Linear layers of 4-bit weights on one row: their time is the time to read the weights."""

import torch
from torch import Tensor

from anyformer.kernels.matmul import MIN_WEIGHTS, RowFusion, TileShape, contiguous, is_few_rows, row_like
from anyformer.kernels.runtime import opaque, supports_dependent_launch

COLUMN_BLOCK = 256  # the input width is a multiple of it


def interleave(packed: Tensor) -> Tensor:
    """Transpose every 16 bytes, as a matrix of 4 x 4; doing it again restores them.

    Bytes hold two neighbouring integers. A thread loads 16 bytes as four words, and byte i of all four belongs to eight
    neighbouring elements of x: one load. Rows of another length, which the kernel does not read, stay as they are.
    """
    return packed if packed.shape[-1] % 16 else packed.unflatten(-1, (-1, 4, 4)).mT.flatten(-3)


def fits_int4_kernel(x: Tensor, packed: Tensor) -> bool:
    """Return whether the kernel supports a call: one row in half precision on CUDA, without gradients."""
    return is_few_rows(x) and has_int4_kernel(packed, x.shape[-1])


def has_int4_kernel(packed: Tensor, width: int) -> bool:
    """Return whether the kernel reads a matrix: large enough, of whole blocks, with rows of `width` weights."""
    return (
        width == 2 * packed.shape[1:].numel()
        and width % COLUMN_BLOCK == 0
        and packed.shape[-1] % 16 == 0
        and 2 * packed.numel() >= MIN_WEIGHTS
        and packed.is_contiguous()
    )


def shape_of(n: int, k: int) -> TileShape:
    """Return the fastest measured tile sizes, as `matmul.shape_of` does; columns divide the width."""
    rows, columns, per_warp = (16, 2048, 512) if n >= 8192 else (8, 8192, 1024) if k >= 8192 else (4, 2048, 1024)
    columns = min(columns, k & -k)
    return TileShape(rows, columns, max(1, columns // per_warp))


@opaque("int4_linear", row_like)
def int4_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x Wᵀ + bias [..., n] of one row x [..., k], with W = scale · q.

    `packed` [n, groups, g / 2] are the integers of `Rounded.q`, packed and interleaved; `scale` is [n, groups].
    The arguments after `bias` are a `RowFusion`.
    """
    fusion = RowFusion(norm, eps, gated, residual)
    out = row_like(x, packed, scale, bias, *fusion)
    launch(x, packed, scale, bias, out, shape_of(len(packed), x.shape[-1]), fusion)
    return out


def launch(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    shape: TileShape,
    fusion: RowFusion,
) -> None:
    """Run the kernel with these tile sizes."""
    import triton.language as tl

    from anyformer.kernels.triton_matmul import multiply_row_int4

    n, k = len(packed), x.shape[-1]
    early = supports_dependent_launch(x.device)
    multiply_row_int4[(-(-n // shape.rows),)](
        _pairs(x), packed.view(torch.int32), scale, bias, None if fusion.norm is None else _pairs(fusion.norm),
        contiguous(fusion.residual), out, out.numel(), fusion.eps,
        K=k, GROUP=k // scale.shape[-1], HALF=tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float16,
        GATED=fusion.gated, EARLY=early, PACKED=early, ROWS=shape.rows, COLUMNS=shape.columns,
        num_warps=shape.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _pairs(x: Tensor) -> Tensor:
    """Return elements of 16 bits as pairs."""
    x = x.contiguous() if x.storage_offset() % 2 == 0 else x.clone()
    return x.view(-1).view(torch.int32)
