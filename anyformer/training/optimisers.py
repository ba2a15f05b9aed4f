"""Optimisers, with weight decay on matrices only, and a pace for each layer.

A group's `pace` is its share of the learning rate, which the loop sets at every step.
"""

from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from anyformer.recipe import Adam, AdamW, Optimizer


def build_optimizer(
    spec: Optimizer, model: nn.Module, pace: Callable[[str], float] = lambda name: 1.0
) -> TorchOptimizer:
    """Over the weights that are not frozen; `pace` is that of a weight, by its name."""
    fused = next(model.parameters()).device.type == "cuda"
    match spec:
        case AdamW():
            groups = _groups(model, pace, decays=(spec.weight_decay, 0.0))
            return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case Adam():
            groups = _groups(model, pace, decays=(0.0, 0.0))
            return torch.optim.Adam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case _:
            assert_never(spec)


def _groups(model: nn.Module, pace: Callable[[str], float], decays: tuple[float, float]) -> list[dict[str, Any]]:
    """Matrices decay; biases and the scales of norms, which are vectors, do not."""
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            found.setdefault((pace(name), decays[p.dim() < 2]), []).append(p)
    return [{"params": ps, "weight_decay": decay, "pace": share} for (share, decay), ps in found.items()]
