"""Linear layers on few rows, as in decode steps: their time is the time to read the weights."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.conventions import next_power_of_two
from anyformer.kernels.prepacked import can_use_prepacked, prepacked_linear
from anyformer.kernels.runtime import HALF, HAS_TRITON, opaque, supports_dependent_launch

COLUMN_BLOCK = 256  # the input width is a multiple of it
MIN_WEIGHTS = 1 << 18  # smaller matrices are launch-bound
MAX_INT8_ROWS = 64  # with more rows, dequantising int8 weights first is faster
TRANSPOSED_ROWS = range(9, 33)  # row counts for which a CPU computes weight xᵀ faster than x weightᵀ


class TileShape(NamedTuple):
    """Tile sizes of one program."""

    rows: int  # at once
    columns: int
    warps: int
    flat: bool = False  # every row of threads loads x itself, without exchange between threads
    ahead: int = 1  # blocks of columns that are loaded before x is there


class RowFusion(NamedTuple):
    """Steps around a one-row matmul that its kernel includes: residual + gate(rms_norm(x) Wᵀ + b), in fp32."""

    norm: Tensor | None = None  # weight [k] of the norm
    eps: float = 0.0
    gated: bool = False  # W has n rows of the gate, then n of the other half: silu(gate) ⊙ other
    residual: Tensor | None = None  # [..., n]


def shape_of(weight: Tensor) -> TileShape:
    """Return the fastest measured tile sizes (H200, the matrices of a model with 1.2 billion weights).

    `benchmarks/sweep_rows.py` measures them in a chain of layers. The head is not in it.
    """
    n, k = weight.shape
    if weight.element_size() > 1:
        return TileShape(2, 1024, 2, ahead=2)
    if k >= 4096:
        return TileShape(4, 2048, 4, flat=True)
    if n >= 65536:
        return TileShape(4, 512, 1)
    if n >= 8192:
        return TileShape(4, 512, 1, flat=True, ahead=4)
    return TileShape(4, 1024, 4, flat=True) if n <= 2048 else TileShape(2, 1024, 1, flat=True)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, by a faster path for few rows.

    One row on a GPU takes a Triton kernel. Few rows on a CPU take prepacked weights or the transposed matmul.
    """
    if x.is_cuda and fits_row_kernel(x, weight):
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
    """Return whether weight xᵀ is faster than x weightᵀ: few rows in fp32 on a CPU, without gradients."""
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
    """Return whether the row kernels support a call with at most `most` rows."""
    return is_few_rows(x, most) and has_row_kernel(weight, x.dtype)


def is_few_rows(x: Tensor, most: int = 1) -> bool:
    """Return whether x has at most `most` rows, in half precision on CUDA, without gradients."""
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dtype in HALF
        and 0 < x.numel() <= most * x.shape[-1]
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
    )


def has_row_kernel(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the row kernels read a matrix: large enough, of whole blocks, in int8 or in the precision of x."""
    return (
        weight.dtype in (dtype, torch.int8)
        and weight.shape[-1] % COLUMN_BLOCK == 0
        and weight.numel() >= MIN_WEIGHTS
        and weight.is_contiguous()
    )


def int8_is_faster(weight: Tensor) -> bool:
    """Return whether an int8 copy of these weights speeds up a single row."""
    return HAS_TRITON and weight.is_cuda and weight.dtype in HALF and weight.shape[-1] % COLUMN_BLOCK == 0


def row_like(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, *fusion: Any) -> Tensor:
    """Return an empty output of a matmul with these arguments; those after `bias` are of a `RowFusion`."""
    return x.new_empty(*x.shape[:-1], len(weight) // 2 if RowFusion(*fusion).gated else len(weight))


@opaque("one_row_linear", row_like)
def one_row_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return x weightᵀ · scale + bias [..., n] of one row x [..., k], weight [n, k], scale [n] and bias [n].

    The arguments after `bias` are a `RowFusion`.
    """
    fusion = RowFusion(norm, eps, gated, residual)
    out = row_like(x, weight, scale, bias, *fusion)
    launch(x, weight, scale, bias, out, shape_of(weight), fusion)
    return out


@opaque("int8_linear", row_like)
def int8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weightᵀ · scale + bias [..., n] of few rows x [..., k] and an int8 weight [n, k] with scale [n]."""
    from anyformer.kernels.triton_matmul import multiply_rows

    out, (n, k), m = row_like(x, weight, scale, bias), weight.shape, x.shape[:-1].numel()
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
    shape: TileShape,
    fusion: RowFusion,
) -> None:
    """Run the kernel with these tile sizes; the number of columns is reduced to a divisor of the width."""
    from anyformer.kernels.triton_matmul import multiply_row

    (n, k), (rows, columns, warps, flat, ahead) = weight.shape, shape
    columns = min(columns, k & -k)
    early = supports_dependent_launch(x.device)
    multiply_row[(-(-n // rows),)](
        x.contiguous(), weight, scale, bias, fusion.norm, contiguous(fusion.residual), out, out.numel(), fusion.eps,
        K=k, GATED=fusion.gated, EARLY=early, PACKED=early and scale is not None,
        FLAT=flat, ROWS=rows, COLUMNS=columns, AHEAD=min(ahead * columns, k),
        num_warps=warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
