"""Kernels of decode steps over KV caches, paged or of beams; see `attention/few_queries.py` for reading them."""

import torch
from torch import Tensor

from anyformer.kernels.conventions import next_power_of_two
from anyformer.kernels.runtime import HAS_TRITON, with_unit_stride


def write_pages(pools: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], slots: Tensor, is_token: Tensor) -> None:
    """Write new keys and values [b, g, t, k] to their slots [b, t] of pools [1, g, slots, k]; padding as zeros."""
    from anyformer.kernels.triton_paged import write_pages as kernel

    (keys, values), (k, v) = pools, (with_unit_stride(x) for x in new)
    (b, g, t, width), k_v = k.shape, v.shape[-1]
    kernel[(b * t,)](
        k, v, keys, values, slots.contiguous(), is_token.contiguous(), t, g, *k.stride()[:3], *v.stride()[:3],
        keys.stride(1), values.stride(1), width, k_v,
        G=next_power_of_two(g), K=next_power_of_two(width), V=next_power_of_two(k_v),
    )  # fmt: skip


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [b, h, t, k] rotated by angles [b or 1, 1, t, k], as `RotaryScheme.rotate` does."""
    from anyformer.kernels.triton_paged import rotate_heads as kernel

    x = with_unit_stride(x)
    b, h, t, width = x.shape
    out = x.new_empty(b, t, h, width)
    kernel[(b * t,)](
        x, cos, sin, out, h, t, width // 2, *x.stride()[:3], 0 if len(cos) == 1 else cos.stride(0), cos.stride(2),
        H=next_power_of_two(h), HALF=next_power_of_two(width // 2),
    )  # fmt: skip
    return out.transpose(1, 2)


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
