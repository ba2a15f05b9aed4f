"""Weight initialisation by the rule of the config, after building, so that building on the meta device works."""

import math
from collections.abc import Iterator
from typing import Protocol, assert_never, runtime_checkable

import torch
from torch import Tensor, nn

from anyformer.attention.position_module import Positions
from anyformer.config import FanIn, Init, Normal, Xavier
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.attention_variants.latent import LatentAttention
from anyformer.nn.block import Sublayer
from anyformer.nn.dense import DenseMixer, PositionMixer
from anyformer.nn.experts import StackedLinear
from anyformer.nn.heads import VocabularyHead
from anyformer.nn.linear import Linear
from anyformer.nn.lora import LowRank
from anyformer.nn.stack import BlockStack


@runtime_checkable
class Resets(Protocol):
    """A module that initialises its own weights, mostly to 0 or 1."""

    def reset(self) -> None:
        """Initialise the weights of the module itself, not those of modules within it."""


@runtime_checkable
class Branch(Protocol):
    """The inner module of a sublayer, which says how its output is computed."""

    def residual_weights(self) -> Iterator[Tensor]:
        """Yield the last matrix, whose output is added to the residual stream."""


def allocate(model: nn.Module, device: torch.device | str) -> None:
    """Replace all weights and buffers of the meta device by uninitialised ones.

    `model.to_empty` does the same, and imports sympy for it: half a second of every start.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # has a list of its weights
            module.to_empty(device=device, recurse=False)
            continue
        for name, old in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            new = torch.empty(old.shape, dtype=old.dtype, device=device)
            setattr(module, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


@torch.no_grad()
def initialise(model: nn.Module, init: Init, width: int) -> None:
    """Initialise all weights of a model that is not on the meta device."""
    for module in model.modules():
        if isinstance(module, (LowRank, nn.ParameterDict)):
            continue  # adapters come last; tables are filled with the position scheme that owns them
        if (matrices := _matrices(module)) is not None:
            for weight in matrices:
                _fill_matrix(weight, init)
            _zero_biases(module)
        elif not _fill_table(module, init, width) and not _fill_constants(module):
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            assert not own, f"no rule initialises {type(module).__name__}"
    _scale_by_role(model, init)
    for module in model.modules():
        if isinstance(module, LowRank):
            module.reset()  # last, so that all other weights are those of the model without adapters


def _matrices(module: nn.Module) -> list[Tensor] | None:
    """Return the matrices of a linear, recurrent or convolutional module, each filled by itself; None for others."""
    match module:
        case StackedLinear():
            return [rows for expert in module.rows() for rows in expert.split(module.parts)]
        case Linear():
            return [module.rows(part) for part in range(len(module.parts))]
        case nn.Linear():
            return [module.weight]
        case nn.RNNBase():
            weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
            return [rows for weight in weights for rows in weight.split(module.hidden_size)]  # one for each gate
        case nn.Conv1d() | nn.Conv2d():
            return [module.weight.flatten(1)]
        case DenseMixer() | PositionMixer():
            return [module.weight]
        case _:
            return None


def _zero_biases(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("bias"):
            parameter.zero_()


def _fill_table(module: nn.Module, init: Init, width: int) -> bool:
    """Initialise a module with a table of vectors; return whether it is one."""
    match module:
        case nn.Embedding():
            module.weight.normal_(std=_std(init, width))
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        case Positions():
            std = width**-0.5 if isinstance(init, FanIn) else _std(init, width)  # small compared to embeddings of 1
            for name, table in module.tables.items():
                module.scheme.fill(name, table, std)
        case VocabularyHead():
            if module.table is not None:
                module.table.normal_(std=_std(init, width))
            _zero_biases(module)
        case _:
            return False
    return True


def _fill_constants(module: nn.Module) -> bool:
    """Initialise a module whose weights have their own rule, mostly 0 or 1; return whether it is one."""
    match module:
        case nn.LayerNorm():
            module.weight.fill_(1)
            _zero_biases(module)
        case Resets():
            module.reset()
        case _:
            return False
    return True


def _scale_by_role(model: nn.Module, init: Init) -> None:
    """Scale the matrices whose size depends on where they are in the model."""
    for stack in (m for m in model.modules() if isinstance(m, BlockStack)):
        if isinstance(init, Normal) and init.residual:
            for weight in _residual_outputs(stack):
                weight.div_(math.sqrt(2 * len(stack.runs)))
        for module in stack.modules():
            if isinstance(init, FanIn) and isinstance(module, MultiHeadAttention) and module.scale == 1:
                # unscaled scores: the queries carry the 1/sqrt(k)
                rows = _queries(module)
                rows.div_(math.sqrt(rows.shape[0] // module.heads))


def _queries(attention: MultiHeadAttention) -> Tensor:
    """Return the rows of the weight that project the queries."""
    if isinstance(attention, LatentAttention):
        return attention.latent.queries()
    return attention.q.rows() if isinstance(attention, CrossAttention) else attention.qkv.rows(0)


def _residual_outputs(stack: BlockStack) -> Iterator[Tensor]:
    """Yield the last matrix of every branch that is added to the residual stream."""
    sublayers = [m for m in stack.modules() if isinstance(m, Sublayer)]
    without_residual = {m for sublayer in sublayers if not sublayer.residual for m in sublayer.modules()}
    for module in stack.modules():
        if module in without_residual:
            continue
        if isinstance(module, Branch):
            yield from module.residual_weights()


def _fill_matrix(weight: Tensor, init: Init) -> None:
    out, into = weight.shape
    match init:
        case Normal(std=std):
            weight.normal_(std=std)
        case Xavier():
            bound = math.sqrt(6 / (into + out))
            weight.uniform_(-bound, bound)
        case FanIn():
            weight.normal_(std=into**-0.5)
        case _:
            assert_never(init)


def _std(init: Init, width: int) -> float:
    match init:
        case Normal(std=std):
            return std
        case Xavier():
            return width**-0.5
        case FanIn():
            return 1.0
        case _:
            assert_never(init)
