"""Muon (Jordan et al. 2024): momentum whose update of each matrix is made nearly orthogonal.

    m ← β m + (1 - β) g        u = β m + (1 - β) g        w ← w - η λ w - η · 0.2 sqrt(max(rows, columns)) · O(u)

O(u) has the singular vectors of u, and singular values near 1. The factor gives an update the root mean square of one
of AdamW (Liu et al. 2025). Each projection of a fused layer, and each expert, is a separate matrix: the singular
values of one projection say nothing about those of another. AdamW updates the weights that are no hidden matrices.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from anyformer.recipe import MUON_ITERATIONS
from anyformer.training.ranks.collectives import local

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic: a steep slope at 0, and values near 1 up to 1
MIN_NORM = 1e-7  # avoids division by 0
ADAM_RMS = 0.2  # root mean square of an update of AdamW, divided by the learning rate
MAX_BATCH_VALUES = 2**27  # that are made orthogonal at a time: bounds the memory of copies


def orthogonalise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices [n, rows, columns] with all singular values near 1, by Newton–Schulz iterations in `dtype`.

    Each iteration applies a x + b (x xᵀ) x + c (x xᵀ)² x to the singular values, which start in [0, 1].
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).to(dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=MIN_NORM)
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MatrixLayout(NamedTuple):
    """How a stored weight [rows, columns] or [experts, rows, columns] is made of projections."""

    parts: tuple[int, ...]  # rows of each projection
    order: Tensor | None = None  # of a fused weight that is split among processes: row i is row order[i] of the layer


class MuonOptimizer(torch.optim.AdamW):
    """AdamW, except for parameter groups with a `momentum`: their weights have a `MatrixLayout`."""

    def __init__(self, groups: list[dict[str, Any]], layouts: Mapping[Tensor, MatrixLayout], **options: Any):
        super().__init__(groups, **options)
        self.layouts = layouts

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # that of Adam expects a `step` for every weight

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all weights. A `found_inf` of 1 leaves everything as it is, as in torch's fused kernels."""
        for group in self.param_groups:
            if group["momentum"] is not None:
                for weights in self._batches(group):
                    self._update(weights, group)
                for weight in group["params"]:
                    weight.grad = None  # AdamW skips it
        return super().step(closure)

    def _batches(self, group: dict[str, Any]) -> Iterator[list[Tensor]]:
        """Yield lists of weights with equal shapes and projections, which are made orthogonal together."""
        alike: dict[Any, list[Tensor]] = {}
        for weight in group["params"]:
            if weight.grad is not None:
                parts, order = self.layouts[weight]
                alike.setdefault((weight.shape, parts, order is None), []).append(weight)
        for weights in alike.values():
            size = max(1, MAX_BATCH_VALUES // weights[0].numel())
            yield from (weights[i : i + size] for i in range(0, len(weights), size))

    def _update(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        skip = getattr(self, "found_inf", None)
        skip = None if skip is None else skip.bool()
        updates = [self._momentum(weight, group["momentum"], skip) for weight in weights]
        for weight, update in zip(weights, self._orthogonal(weights, updates), strict=True):
            values, lr = local(weight), group["lr"]
            changed = values * (1 - lr * group["weight_decay"]) - lr * _shard_like(update, weight)
            values.copy_(changed if skip is None else torch.where(skip, values, changed))

    def _momentum(self, weight: Tensor, beta: float, skip: Tensor | None) -> Tensor:
        """Advance the moving average of a gradient. Return the look-ahead of it, gathered from all processes."""
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        average = state["momentum"]
        mean, gradient = local(average), local(weight.grad)  # type: ignore[arg-type]  # not None: `_batches`
        changed = mean.lerp(gradient, 1 - beta)
        mean.copy_(changed if skip is None else torch.where(skip, mean, changed))
        ahead = weight.grad.lerp(average, beta)  # type: ignore[union-attr]
        return ahead.full_tensor() if isinstance(ahead, DTensor) else ahead

    def _orthogonal(self, weights: list[Tensor], updates: list[Tensor]) -> Iterator[Tensor]:
        """Yield the update of each weight from the look-ahead of its momentum."""
        parts, order = self.layouts[weights[0]]
        dtype = torch.bfloat16 if updates[0].is_cuda else updates[0].dtype
        if order is not None:
            back = order.argsort().to(updates[0].device)
            updates = [update[back] for update in updates]
        stacked = torch.stack([update.to(dtype) for update in updates])
        matrices = stacked.view(-1, *stacked.shape[-2:])  # [weights · experts, rows, columns]
        made = [
            orthogonalise(matrix, dtype).float() * (ADAM_RMS * math.sqrt(max(matrix.shape[-2:])))
            for matrix in matrices.split(parts, dim=-2)
        ]
        for update in torch.cat(made, dim=-2).view(stacked.shape):
            yield update if order is None else update[order.to(update.device)]


def _shard_like(x: Tensor, weight: Tensor) -> Tensor:
    """Return this process's part of a full tensor that all processes hold."""
    if not isinstance(weight, DTensor):
        return x
    return local(distribute_tensor(x.contiguous(), weight.device_mesh, weight.placements, src_data_rank=None))
