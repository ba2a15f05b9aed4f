"""Reorder the rows of a cache within groups (beams), in place, by one kernel."""

import torch
from torch import Tensor

from anyformer.kernels.conventions import next_power_of_two
from anyformer.kernels.runtime import HAS_TRITON

BLOCK = 1024  # elements of each row that one program moves
MAX_GROUP = 16  # rows: a program holds all of them at once


def reorder_in_groups(x: Tensor, rows: Tensor, length: Tensor, within: int) -> None:
    """Set row i of x [b, g, slots, k] to the old row `rows[i]`, which is in the same group of `within` rows.

    Only the first `length` slots are moved.
    """
    from anyformer.kernels.triton_kernels import regroup_rows

    size = x[0].numel()
    grid = x.shape[0] // within, -(-size // BLOCK)
    sizes = {"N": within, "ROWS": next_power_of_two(within), "COLUMNS": BLOCK}
    regroup_rows[grid](x, rows, length, size, x.shape[2], x.shape[3], **sizes)


def can_reorder_in_groups(x: Tensor, within: int) -> bool:
    """Return whether `reorder_in_groups` supports this tensor and group size."""
    here = HAS_TRITON and x.is_cuda and torch.version.hip is None
    return here and x.dim() == 4 and x.is_contiguous() and within <= MAX_GROUP
