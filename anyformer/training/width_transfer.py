"""Width transfer: initial weights and learning rates of `train.scale` (see `recipe/width_transfer.py`).

The hidden matrices of a model are the linear layers and experts of its blocks, which map one hidden vector to another.
Width transfer scales them, and the optimiser `muon` updates them. Embeddings, heads, routers, recurrent cells,
convolutions, adapters and all vectors are not among them.
"""

import math
from collections.abc import Collection

import torch
from torch import nn

from anyformer.attention.position_module import Positions
from anyformer.nn.experts import SigmoidRouter, SoftmaxRouter, StackedLinear
from anyformer.nn.heads import VocabularyHead
from anyformer.nn.linear import Linear
from anyformer.nn.model import Transformer
from anyformer.recipe import MuP, Optimizer, WidthScale


def hidden_matrices(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the rows of each projection within a hidden matrix, by the name of its weight.

    A fused layer (queries, keys and values; gate and up) has several projections. Of a model that is split among
    processes these would be the rows of one process: call it before the split.
    """
    return {
        f"{name}.weight": module.parts
        for name, module in model.named_modules()
        if ".blocks." in f".{name}" and isinstance(module, Linear | StackedLinear) and module.weight is not None
    }


@torch.no_grad()
def scale_weights(model: Transformer, scale: WidthScale) -> None:
    """Scale the initial weights of a new model to those of its width."""
    if not isinstance(scale, MuP):
        return
    ratio = scale.ratio(model.config.width)
    by_inputs = model.config.init.by_inputs  # already in proportion to the root of the width
    hidden, parameters = hidden_matrices(model), dict(model.named_parameters())
    for name in hidden:
        parameters[name].mul_(1.0 if by_inputs else math.sqrt(ratio))
    for module in model.modules():
        if isinstance(module, SoftmaxRouter | SigmoidRouter):
            module.linear.weight.mul_(math.sqrt(ratio) if by_inputs else ratio)
        elif by_inputs and isinstance(module, nn.Embedding | Positions | VocabularyHead):
            for table in _tables(module):
                table.mul_(1 / math.sqrt(ratio))


def _tables(module: nn.Module) -> list[torch.Tensor]:
    """Return the tables of vectors that a module owns; a tied head owns none."""
    match module:
        case nn.Embedding():
            return [module.weight]
        case Positions():
            return list(module.tables.values())
        case VocabularyHead():
            return [] if module.table is None else [module.table]
        case _:
            return []


def width_scale(name: str, hidden: Collection[str], width: int, scale: WidthScale, optimizer: Optimizer) -> float:
    """Return the factor on the learning rate of a weight."""
    if not isinstance(scale, MuP) or (rate := type(optimizer).width_rate) is None:
        return 1.0
    ratio = scale.ratio(width)
    if name in hidden:
        return rate(ratio)
    return ratio if ".router." in name and name.endswith("weight") else 1.0
