"""Optimisers with weight decay on matrices only, and a scale of the learning rate for each layer.

The `lr_scale` of a parameter group multiplies the learning rate, which the loop sets at every step. Where it depends on
the width, the decay per step does not: the group's weight decay is divided by that factor.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer as TorchOptimizer

from anyformer.nn.model import Transformer
from anyformer.parallel.collectives import mesh_of
from anyformer.parallel.tensor import SplitTransformer
from anyformer.recipe import SGD, Adafactor, Adam, AdamW, Muon, Optimizer, Train
from anyformer.training import muon
from anyformer.training.finetune import lr_scale
from anyformer.training.hidden_matrices import hidden_matrices
from anyformer.training.width_transfer import width_scale

Groups = list[dict[str, Any]]


class Rates(NamedTuple):
    """Factors on the learning rate of a weight."""

    layer: float = 1.0  # of its layer (`train.layer_decay`)
    width: float = 1.0  # of its shape (`train.scale`)


RatesOf = Callable[[str], Rates]  # by the name of a weight


def training_optimizer(train: Train, model: Transformer, matrices: Mapping[str, tuple[int, ...]]) -> TorchOptimizer:
    """Return the optimiser of a recipe, with learning rates by layer and by width."""

    def rates(name: str) -> Rates:
        width = width_scale(name, matrices, model.config.width, train.scale, train.optimizer)
        return Rates(lr_scale(name, model.config, train.layer_decay), width)

    return build_optimizer(train.optimizer, model, rates, matrices)


def build_optimizer(
    spec: Optimizer,
    model: nn.Module,
    rates: RatesOf = lambda name: Rates(),
    matrices: Mapping[str, tuple[int, ...]] | None = None,
) -> TorchOptimizer:
    """Return an optimiser of all weights that are not frozen; `rates` maps the name of a weight to its rates.

    `matrices` are the hidden matrices of the model before it was split among processes; None: it is not split.
    """
    fused = next(model.parameters()).device.type == "cuda"
    match spec:
        case AdamW():
            groups = _groups(model, rates, spec.weight_decay)
            return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case Adam():
            groups = _groups(model, rates)
            return torch.optim.Adam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case Muon():
            layouts = _layouts(model, hidden_matrices(model) if matrices is None else matrices)
            groups = _muon_groups(spec, model, rates, layouts)
            return muon.Muon(groups, layouts, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused)
        case Adafactor():
            return torch.optim.Adafactor(_groups(model, rates, spec.weight_decay), lr=spec.lr)
        case SGD():
            fused = fused and not any(mesh_of(p) for p in model.parameters())  # it has no kernel for sharded weights
            groups = _groups(model, rates, spec.weight_decay)
            sgd = torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, fused=fused)
            for p in (p for group in sgd.param_groups for p in group["params"] if spec.momentum):
                sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)  # else a skipped first step leaves it undefined
            return sgd
        case _:
            assert_never(spec)


def _groups(model: nn.Module, rates: RatesOf, decay: float = 0.0, kind: Callable[[Tensor], Any] = type) -> Groups:
    """Group the weights by scale and decay: matrices decay; biases and norm scales, which are vectors, do not.

    A group has weights of one mesh of processes, or of none: torch updates its weights together. Weights of different
    `kind` are in different groups.
    """
    groups: dict[tuple[float, float, DeviceMesh | None, Any], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            layer, width = rates(name)
            key = layer * width, decay / width if p.dim() >= 2 else 0.0, mesh_of(p), kind(p)
            groups.setdefault(key, []).append(p)
    return [{"params": ps, "weight_decay": decay, "lr_scale": scale} for (scale, decay, *_), ps in groups.items()]


def _muon_groups(spec: Muon, model: nn.Module, rates: RatesOf, layouts: Mapping[Tensor, muon.MatrixLayout]) -> Groups:
    """Group the weights as `_groups` does, with a `momentum` for hidden matrices and another rate for the rest."""
    groups = _groups(model, rates, spec.weight_decay, kind=lambda p: p in layouts)
    for group in groups:
        is_hidden = group["params"][0] in layouts
        group["momentum"] = spec.momentum if is_hidden else None
        group["lr_scale"] *= 1.0 if is_hidden else (spec.adam_lr or spec.lr) / spec.lr
    return groups


def _layouts(model: nn.Module, matrices: Mapping[str, tuple[int, ...]]) -> dict[Tensor, muon.MatrixLayout]:
    orders = model.row_orders if isinstance(model, SplitTransformer) else {}
    weights = dict(model.named_parameters())
    return {weights[name]: muon.MatrixLayout(parts, orders.get(name)) for name, parts in matrices.items()}
