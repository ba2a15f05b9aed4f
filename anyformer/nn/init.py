"""Initialisation: every weight filled by the rule that the config names, after building (so building on meta works)."""

import math
from typing import assert_never

import torch
from torch import Tensor, nn

from anyformer.attention.position_tables import Positions
from anyformer.config import FanIn, Init, Normal, Xavier
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.block import Sublayer
from anyformer.nn.dense import DenseMixer, PositionMixer
from anyformer.nn.experts import Mixture, SigmoidRouter, StackedLinear
from anyformer.nn.feedforward import GatedFFN, PlainFFN
from anyformer.nn.heads import TokenHead, VocabularyHead
from anyformer.nn.linear import Linear
from anyformer.nn.lora import LowRank
from anyformer.nn.norm import OverBatch, RootMeanSquare
from anyformer.nn.recurrent import RecurrentMixer
from anyformer.nn.stack import BlockStack


@torch.no_grad()
def initialise(model: nn.Module, init: Init, width: int) -> None:
    """Fills all parameters of a model with materialised (not meta) weights."""
    for module in model.modules():
        match module:
            case RootMeanSquare():
                module.weight.fill_(1 - module.offset)
            case nn.LayerNorm():
                module.weight.fill_(1)
                if module.bias is not None:
                    module.bias.zero_()
            case OverBatch():
                module.weight.fill_(1)
                module.bias.zero_()
                module.reset()
            case SigmoidRouter():
                module.reset()
            case LowRank():
                continue  # last, so that the other weights are those of a model without
            case StackedLinear():
                for expert in module.rows():
                    for rows in expert.split(module.parts):
                        _matrix(rows, init)
                if module.bias is not None:
                    module.bias.zero_()
            case Linear():
                for i in range(len(module.parts)):
                    _matrix(module.rows(i), init)
                if module.bias is not None:
                    module.bias.zero_()
            case nn.Linear():
                _matrix(module.weight, init)
                if module.bias is not None:
                    module.bias.zero_()
            case nn.RNNBase():
                for parameter in module.parameters():
                    for rows in parameter.split(module.hidden_size):  # of each gate
                        _matrix(rows, init) if rows.dim() == 2 else rows.zero_()
            case nn.Conv1d():
                _matrix(module.weight.flatten(1), init)
                if module.bias is not None:
                    module.bias.zero_()
            case DenseMixer() | PositionMixer():
                _matrix(module.weight, init)
                if module.bias is not None:
                    module.bias.zero_()
            case nn.Embedding():
                _table(module.weight, init, width)
                if module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()
            case Positions():
                std = width**-0.5 if isinstance(init, FanIn) else _std(init, width)  # small beside embeddings of 1
                for name, table in module.tables.items():
                    module.scheme.fill(name, table, std)
            case nn.ParameterDict():
                continue  # tables, filled with the scheme that owns them
            case MultiHeadAttention():
                if module.sinks is not None:
                    module.sinks.zero_()
            case TokenHead():
                if module.transitions is not None:
                    module.transitions.zero_()
            case VocabularyHead():
                if module.table is not None:
                    _table(module.table, init, width)
                if module.bias is not None:
                    module.bias.zero_()
            case _:
                own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
                assert not own, f"no rule initialises {type(module).__name__}"
    _adjust(model, init)
    for module in model.modules():
        if isinstance(module, LowRank):
            module.reset()


def _adjust(model: nn.Module, init: Init) -> None:
    """What depends on where a matrix stands."""
    for stack in (m for m in model.modules() if isinstance(m, BlockStack)):
        sublayers = [m for m in stack.modules() if isinstance(m, Sublayer)]
        apart = {m for sublayer in sublayers if not sublayer.residual for m in sublayer.modules()}
        for module in stack.modules():
            if isinstance(init, Normal) and init.residual and module not in apart:
                if isinstance(module, (MultiHeadAttention, RecurrentMixer)) and isinstance(module.out, Linear):
                    module.out.rows().div_(math.sqrt(2 * len(stack.runs)))
                if isinstance(module, (PlainFFN, GatedFFN, Mixture)):
                    module.down.rows().div_(math.sqrt(2 * len(stack.runs)))
                if isinstance(module, (nn.Conv1d, DenseMixer, PositionMixer)):
                    module.weight.div_(math.sqrt(2 * len(stack.runs)))
            if isinstance(init, FanIn) and isinstance(module, MultiHeadAttention) and module.scale == 1:
                # unscaled scores: the queries carry the 1/sqrt(k)
                rows = module.queries()
                rows.div_(math.sqrt(rows.shape[0] // module.heads))


def _matrix(weight: Tensor, init: Init) -> None:
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


def _table(weight: Tensor, init: Init, width: int) -> None:
    weight.normal_(std=_std(init, width))


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
