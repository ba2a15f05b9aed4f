"""Rows that change places among few neighbours, in place, by one kernel."""

import torch
from torch import Tensor

from anyformer.conventions import next_power_of_two
from anyformer.kernels.runtime import HAS_TRITON

BLOCK = 1024  # numbers of each row that one program moves
WIDEST = 16  # neighbours at most: a program holds all of them at once


def reorder_in_groups(x: Tensor, rows: Tensor, length: Tensor, within: int) -> None:
    """Row i of x [b, g, slots, k] becomes what row `rows[i]` was, one of the same `within` neighbours; only the first
    `length` slots count."""
    from anyformer.kernels.triton_kernels import regroup_rows

    size = x[0].numel()
    grid = x.shape[0] // within, -(-size // BLOCK)
    sizes = {"N": within, "ROWS": next_power_of_two(within), "COLUMNS": BLOCK}
    regroup_rows[grid](x, rows, length, size, x.shape[2], x.shape[3], **sizes)


def can_reorder_in_groups(x: Tensor, within: int) -> bool:
    """Whether `regroup` can do it."""
    here = HAS_TRITON and x.is_cuda and torch.version.hip is None
    return here and x.dim() == 4 and x.is_contiguous() and within <= WIDEST
