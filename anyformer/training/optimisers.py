"""Optimisers with weight decay on matrices only, and a scale of the learning rate for each layer.

The `lr_scale` of a parameter group multiplies the learning rate, which the loop sets at every step.
"""

from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer as TorchOptimizer

from anyformer.parallel.collectives import mesh_of
from anyformer.recipe import Adam, AdamW, Optimizer


def build_optimizer(
    spec: Optimizer, model: nn.Module, lr_scale: Callable[[str], float] = lambda name: 1.0
) -> TorchOptimizer:
    """Return an optimiser of all weights that are not frozen; `lr_scale` maps the name of a weight to its scale."""
    fused = next(model.parameters()).device.type == "cuda"
    match spec:
        case AdamW():
            groups = _groups(model, lr_scale, decays=(spec.weight_decay, 0.0))
            return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case Adam():
            groups = _groups(model, lr_scale, decays=(0.0, 0.0))
            return torch.optim.Adam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case _:
            assert_never(spec)


def _groups(model: nn.Module, lr_scale: Callable[[str], float], decays: tuple[float, float]) -> list[dict[str, Any]]:
    """Group the weights by scale and decay: matrices decay; biases and norm scales, which are vectors, do not.

    A group has weights of one mesh of processes, or of none: torch updates its weights together.
    """
    groups: dict[tuple[float, float, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups.setdefault((lr_scale(name), decays[p.dim() < 2], mesh_of(p)), []).append(p)
    return [{"params": ps, "weight_decay": decay, "lr_scale": scale} for (scale, decay, _), ps in groups.items()]
