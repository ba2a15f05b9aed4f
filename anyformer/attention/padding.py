"""Rows of ids of unequal length as one padded tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anyformer.kernels.conventions import PADDING


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return ids [b, t], padded on the right, and their segments; None where no row is padded."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    if min(map(len, rows)) == longest:
        return ids, None
    return ids, torch.tensor([[0] * len(row) + [PADDING] * (longest - len(row)) for row in rows], device=device)
