"""Optimisers with weight decay on matrices only, and a scale of the learning rate for each layer.

The `lr_scale` of a parameter group multiplies the learning rate, which the loop sets at every step. Where it depends on
the width, the decay per step does not: the group's weight decay is divided by that factor.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer as TorchOptimizer

from anyformer.nn.model import Transformer
from anyformer.recipe import Optimizer, Train
from anyformer.training.finetune import lr_scale
from anyformer.training.muon import MatrixLayout
from anyformer.training.ranks.collectives import mesh_of
from anyformer.training.ranks.tensor import SplitTransformer
from anyformer.training.width_transfer import hidden_matrices, width_scale

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
    return spec.build(TrainedWeights(model, rates, hidden_matrices(model) if matrices is None else matrices))


class TrainedWeights:
    """The weights that an optimiser changes."""

    def __init__(self, model: nn.Module, rates: RatesOf, matrices: Mapping[str, tuple[int, ...]]):
        self.model, self.rates, self.matrices = model, rates, matrices

    @property
    def fused(self) -> bool:
        """True if torch has fused kernels for them."""
        return next(self.model.parameters()).device.type == "cuda"

    @property
    def divided(self) -> bool:
        """True if a process has a part of some weights only."""
        return any(mesh_of(p) for p in self.model.parameters())

    @property
    def layouts(self) -> dict[Tensor, MatrixLayout]:
        """The hidden matrices, and how each is made of projections."""
        orders = self.model.row_orders if isinstance(self.model, SplitTransformer) else {}
        weights = dict(self.model.named_parameters())
        return {weights[name]: MatrixLayout(parts, orders.get(name)) for name, parts in self.matrices.items()}

    def groups(self, decay: float = 0.0, kind: Callable[[Tensor], Any] = type) -> Groups:
        """Group the weights by scale and decay: matrices decay; biases and norm scales, which are vectors, do not.

        A group has weights of one mesh of processes, or of none: torch updates its weights together. Weights of
        different `kind` are in different groups.
        """
        groups: dict[tuple[float, float, DeviceMesh | None, Any], list[nn.Parameter]] = {}
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                layer, width = self.rates(name)
                key = layer * width, decay / width if p.dim() >= 2 else 0.0, mesh_of(p), kind(p)
                groups.setdefault(key, []).append(p)
        return [{"params": ps, "weight_decay": decay, "lr_scale": scale} for (scale, decay, *_), ps in groups.items()]
