"""Linear layers on few rows, as in decode steps: their time is the time to read the weights."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.conventions import next_power_of_two
from anyformer.kernels.opaque import opaque
from anyformer.kernels.prepacked import can_use_prepacked, prepacked_linear
from anyformer.kernels.runtime import HALF, HAS_TRITON, supports_dependent_launch

COLUMN_BLOCK = 256  # the input width is a multiple of it
MIN_WEIGHTS = 1 << 18  # smaller matrices are launch-bound
MAX_INT8_ROWS = 64  # with more rows, dequantising int8 weights first is faster
TRANSPOSED_ROWS = range(9, 33)  # row counts for which a CPU computes weight xᵀ faster than x weightᵀ


class Shape(NamedTuple):
    """Tile sizes of one program."""

    rows: int  # at once
    columns: int
    warps: int
    flat: bool = False  # every row of threads loads x itself, without exchange between threads


def shape_of(weight: Tensor) -> Shape:
    """Return the fastest measured tile sizes (H200, the matrices of a model with 1.2 billion weights)."""
    n, k = weight.shape
    if weight.element_size() > 1:
        return Shape(2, 1024, 2)
    if k >= 4096:
        return Shape(4, 2048, 4)
    return Shape(4, 512, 1) if n >= 65536 else Shape(8 if n >= 8192 else 4, 512, 2, flat=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, by a faster path for few rows.

    One row on a GPU takes a Triton kernel. Few rows on a CPU take prepacked weights or the transposed matmul.
    """
    if fits_row_kernel(x, weight):
        return one_row_linear(x, weight, None, bias)
    if can_use_prepacked(x, weight):
        y: Tensor = prepacked_linear(x, weight, bias)
        return y
    if transposed_is_faster(x):
        columns = x.flatten(0, -2).T
        turned = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
        return turned.T.contiguous().unflatten(0, x.shape[:-1])
    return F.linear(x, weight, bias)


def transposed_is_faster(x: Tensor) -> bool:
    """Whether weight xᵀ is faster than x weightᵀ: few rows in fp32 on a CPU, without gradients."""
    return (
        not torch.compiler.is_compiling()  # checked first: reading x.shape would specialise the graph
        and x.device.type == "cpu"
        and x.dtype is torch.float32
        and x.dim() > 1
        and x.shape[:-1].numel() in TRANSPOSED_ROWS
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def fits_row_kernel(x: Tensor, weight: Tensor, most: int = 1) -> bool:
    """Whether the row kernels support a call: at most `most` rows in half precision on CUDA, without gradients, and a
    matrix in the same precision or in int8."""
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dtype in HALF
        and weight.dtype in (x.dtype, torch.int8)
        and 0 < x.numel() <= most * x.shape[-1]
        and x.shape[-1] % COLUMN_BLOCK == 0
        and weight.numel() >= MIN_WEIGHTS
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
    )


def int8_is_faster(weight: Tensor) -> bool:
    """Whether an int8 copy of these weights speeds up a single row."""
    return HAS_TRITON and weight.is_cuda and weight.dtype in HALF and weight.shape[-1] % COLUMN_BLOCK == 0


def _like(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@opaque("one_row_linear", _like)
def one_row_linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x weightᵀ · scale + bias [..., n] of one row x [..., k], weight [n, k], scale [n] and bias [n]."""
    out = _like(x, weight, scale, bias)
    launch(x.contiguous(), weight, scale, bias, out, shape_of(weight))
    return out


@opaque("int8_linear", _like)
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weightᵀ · scale + bias [..., n] of few rows x [..., k] and an int8 weight [n, k] with scale [n]."""
    from anyformer.kernels.triton_kernels import multiply_rows

    out, (n, k), m = _like(x, weight, scale, bias), weight.shape, x.shape[:-1].numel()
    rows, early = 32 if n >= 8192 else 16, supports_dependent_launch(x.device)
    multiply_rows[(-(-n // rows),)](
        x.contiguous(), weight, scale, x if bias is None else bias, out, m, n,
        K=k, BIASED=bias is not None, EARLY=early, M=max(16, next_power_of_two(m)), ROWS=rows, COLUMNS=COLUMN_BLOCK,
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    shape: Shape,
) -> None:
    """Run the kernel with these tile sizes; the number of columns is reduced to a divisor of the width."""
    from anyformer.kernels.triton_kernels import multiply_row

    (n, k), (rows, columns, warps, flat) = weight.shape, shape
    early = supports_dependent_launch(x.device)
    multiply_row[(-(-n // rows),)](
        x, weight, x if scale is None else scale, x if bias is None else bias, out, n,
        K=k, SCALED=scale is not None, BIASED=bias is not None, EARLY=early, PACKED=early and scale is not None,
        ROWS=rows, COLUMNS=min(columns, k & -k), FLAT=flat, num_warps=warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
