"""Rows of keys and values as pages of a pool, in random order."""

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.layout import Pages


def to_pages(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, Pages]:
    """Return pools [1, g, slots, k] of the rows' keys and values [b, g, s, k], and the table; page 0 is of no row."""
    rows, count = len(k), -(-k.shape[2] // size)
    generator = torch.Generator().manual_seed(size)
    table = (1 + torch.randperm(rows * count, generator=generator)).view(rows, count).to(k.device)
    pools = []
    for x in (k, v):
        padded = F.pad(x, (0, 0, 0, count * size - x.shape[2])).unflatten(2, (count, size))  # [b, g, count, size, k]
        pool = x.new_zeros(1 + rows * count, x.shape[1], size, x.shape[3])
        pool[table.flatten()] = padded.transpose(1, 2).flatten(0, 1)
        pools.append(pool.transpose(0, 1).flatten(1, 2)[None])
    return pools[0], pools[1], Pages(table, size, torch.full((rows,), k.shape[2], device=k.device))


def fill_up(x: Tensor, pages: Pages, value: float) -> Tensor:
    """Return a mask or bias [..., s] for all slots of the pages."""
    return F.pad(x, (0, pages.table.shape[1] * pages.size - x.shape[-1]), value=value)
