"""Optimisers, with weight decay on matrices only."""

from typing import assert_never

import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from anyformer.recipe import Adam, AdamW, Optimizer


def build_optimizer(spec: Optimizer, model: nn.Module) -> TorchOptimizer:
    fused = next(model.parameters()).device.type == "cuda"
    match spec:
        case AdamW():
            groups = [
                {"params": decayed, "weight_decay": decay} for decayed, decay in _groups(model, spec.weight_decay)
            ]
            return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case Adam():
            return torch.optim.Adam(model.parameters(), lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case _:
            assert_never(spec)


def _groups(model: nn.Module, decay: float) -> list[tuple[list[nn.Parameter], float]]:
    """Matrices decay; biases and the scales of norms, which are vectors, do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [(matrices, decay), (vectors, 0.0)]
