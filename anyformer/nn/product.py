"""Products of one row with a matrix, as a decode step of one text has: nothing counts but how fast weights are read."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

TRITON = find_spec("triton") is not None  # a torch without CUDA comes without it
HALF = (torch.bfloat16, torch.float16)
STEP = 256  # rows are of whole such blocks
SMALLEST = 1 << 18  # weights: below, all of it is the start of a kernel
# rows and columns that a program reads at once, and its warps, by the bytes of a weight; 8 bits leave no time to wait
# for other warps
SHAPES = {2: (2, 2048, 4), 1: (4, 512, 1)}


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`; one row on a GPU by a kernel of its own."""
    return row_product(x, weight, None, bias) if fits(x, weight) else F.linear(x, weight, bias)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one row, in half precision on CUDA, without gradients, of a matrix in the same precision or int8."""
    return (
        TRITON
        and x.is_cuda
        and x.dtype in HALF
        and weight.dtype in (x.dtype, torch.int8)
        and x.numel() == x.shape[-1]
        and x.shape[-1] % STEP == 0
        and weight.numel() >= SMALLEST
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
    )


def reads_bytes(weight: Tensor) -> bool:
    """Whether one row would be faster by a copy of these weights in 8 bits."""
    return TRITON and weight.is_cuda and weight.dtype in HALF and weight.shape[-1] % STEP == 0


@torch.library.custom_op("anyformer::row_product", mutates_args=())
def row_product(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [..., k], one row, times weight [n, k], each of its rows times its scale [n], plus bias [n]: [..., n]"""
    out = _like(x, weight, scale, bias)
    launch(x.contiguous(), weight, scale, bias, out, *SHAPES[weight.element_size()])
    return out


@row_product.register_fake
def _like(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def launch(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    rows: int,
    columns: int,
    warps: int,
) -> None:
    """Runs the kernel with blocks of so many rows and columns, or of as many columns as divide a row."""
    from anyformer.nn.kernels import multiply_row

    n, k = weight.shape
    early = overlaps(x.device)
    multiply_row[(-(-n // rows),)](
        x, weight, x if scale is None else scale, x if bias is None else bias, out, n,
        K=k, SCALED=scale is not None, BIASED=bias is not None, EARLY=early, PACKED=early and scale is not None,
        ROWS=rows, COLUMNS=min(columns, k & -k), num_warps=warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel there can begin before the last one ends (from Hopper on)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
