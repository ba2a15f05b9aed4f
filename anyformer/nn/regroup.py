"""Rows that change places among few neighbours, in place, by one kernel in Triton: imported where it runs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of each row that one program moves
WIDEST = 16  # neighbours at most: a program holds all of them at once


@triton.jit
def _regroup(x, rows, length, size, slots, width, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    row, at = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = (at < size) & ((at // width) % slots < tl.load(length))
    here = (row < N)[:, None] & wanted[None, :]
    source = tl.load(rows + group * N + row, mask=row < N, other=0)
    found = tl.load(x + source[:, None] * size + at[None, :], mask=here)
    tl.debug_barrier()  # no thread writes before all have read
    tl.store(x + (group * N + row)[:, None] * size + at[None, :], found, mask=here)


def regroup(x: Tensor, rows: Tensor, length: Tensor, within: int) -> None:
    """Row i of x [b, g, slots, k] becomes what row `rows[i]` was, one of the same `within` neighbours; only the first
    `length` slots count."""
    size = x[0].numel()
    grid = x.shape[0] // within, triton.cdiv(size, BLOCK)
    ways = triton.next_power_of_2(within)
    _regroup[grid](x, rows, length, size, x.shape[2], x.shape[3], N=within, ROWS=ways, COLUMNS=BLOCK)


def fits(x: Tensor, within: int) -> bool:
    return x.is_cuda and x.dim() == 4 and x.is_contiguous() and within <= WIDEST and torch.version.hip is None
