"""Norms and output heads as affine maps: everything that is not linear is frozen at the values of one forward pass.

A frozen norm divides by the actual deviation. A frozen activation f multiplies by the actual gain f(z) / z, and so do a
soft cap and a tanh in place of a norm. For that pass the map has the same output as the module, and its output is a
sum over the terms of its input.
"""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anyformer.attention.scores import soft_cap
from anyformer.config import ConfigError, Fault
from anyformer.nn.heads import (
    DenseTransform,
    EmbeddingHead,
    HiddenHead,
    LearnedLength,
    PooledHead,
    SpanHead,
    TokenHead,
    UnitLength,
    VocabularyHead,
)
from anyformer.nn.model import Transformer
from anyformer.nn.norm import OverBatch, RootMeanSquare, ScaledTanh

FROZEN_HEADS = VocabularyHead | TokenHead | SpanHead | PooledHead | HiddenHead


Affine = Callable[[Tensor], Tensor]


def freeze(module: nn.Module, z: Tensor) -> Affine:
    """Return a norm or the transform of a head as an affine map in float64, frozen at its input z [..., d]."""
    z = z.double()
    match module:
        case nn.Identity():
            return lambda x: x
        case nn.Linear():
            return lambda x: x @ module.weight.double().mT
        case nn.LayerNorm():
            gain = module.weight.double() * torch.rsqrt(z.var(dim=-1, correction=0, keepdim=True) + module.eps)
            shift = _bias(module, module.weight)
            return lambda x: gain * (x - x.mean(dim=-1, keepdim=True)) + shift
        case RootMeanSquare():
            scale = torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + module.eps)
            return lambda x: (module.weight.double() + module.offset) * scale * x
        case OverBatch():
            gain = module.weight.double() * torch.rsqrt(module.variance.double() + module.eps)
            return lambda x: gain * (x - module.mean.double()) + module.bias.double()
        case ScaledTanh():
            alpha = module.alpha.double()
            gain = module.weight.double() * torch.where(z == 0, alpha, torch.tanh(alpha * z) / z)
            return lambda x: gain * x + module.bias.double()
        case DenseTransform():
            return _freeze_dense(module, z)
        case _:
            raise _unknown(module)


def _freeze_dense(module: DenseTransform, z: Tensor) -> Affine:
    weight, bias = module.linear.weight.double(), _bias(module.linear, module.linear.weight[:, 0])
    before = z @ weight.mT + bias
    after = module.act(before)
    small = before.abs() < 1e-12  # no gain: f(0) counts as a constant
    gain, constant = torch.where(small, 0, after / torch.where(small, 1, before)), torch.where(small, after, 0)
    norm = freeze(module.norm, after)
    return lambda x: norm(gain * (x @ weight.mT + bias) + constant)


def pull(map: Affine, x: Tensor, u: Tensor | float = 1.0) -> tuple[Tensor, float]:
    """Return the direction in the input of a map, of the shape of x, that a direction u in its output is; the constant.

    ⟨u, map(x)⟩ = ⟨direction, x⟩ + constant
    """
    with torch.enable_grad():
        zero = torch.zeros_like(x, dtype=torch.float64, requires_grad=True)
        constant = (u * map(zero)).sum()
        (direction,) = torch.autograd.grad(constant, zero)
    return direction, float(constant)


def _unknown(module: nn.Module) -> ConfigError:
    return ConfigError([Fault("run", f"its outputs are no sums of terms: {type(module).__name__} has no frozen form")])


def _bias(layer: nn.Linear | nn.LayerNorm, like: Tensor) -> Tensor:
    """Return the bias of a layer in float64, or zeros if it has none."""
    bias: Tensor | None = layer.bias
    return torch.zeros_like(like, dtype=torch.float64) if bias is None else bias.double()


class Direction(NamedTuple):
    """One output of the head as ⟨u, x⟩ + constant, for the hidden states x at some positions."""

    positions: list[int]
    u: Tensor  # [n, d]
    constant: float


@torch.no_grad()
def freeze_head(model: Transformer, hidden: Tensor, index: int, at: int) -> Direction:
    """Return output `index` of the head for hidden states [t, d] after the final norm.

    A head with an output for each token uses position `at` alone. A tag of a CRF is its score without transitions.
    """
    head, x, positions = model.head, hidden.double(), [at]
    map: Affine  # from the hidden states [n, d] at these positions to the output
    match head:
        case VocabularyHead():
            transform, row = freeze(head.transform, x[at]), _table_row(model, head, index) * head.scale
            bias = 0.0 if head.bias is None else float(head.bias[index])
            logit, gain = transform(x[at]) @ row + bias, 1.0
            if head.cap is not None and logit != 0:
                gain = float(soft_cap(logit, head.cap) / logit)
            map = lambda x: gain * (transform(x[0]) @ row + bias)  # noqa: E731
        case TokenHead() | SpanHead():
            transform, row = freeze(head.transform, x[at]), head.linear.weight[index].double()
            map = lambda x: transform(x[0]) @ row + head.linear.bias[index].double()  # noqa: E731
        case PooledHead():
            share = _shares(head, x)
            positions = [i for i in range(len(x)) if bool(share[i].any())]
            of_pooled = _freeze_pooled(head, (share * x).sum(dim=0), index)
            map = lambda x: of_pooled((share[positions] * x).sum(dim=0))  # noqa: E731
        case HiddenHead():
            map = lambda x: x[0, index]  # noqa: E731
        case _:
            raise _unknown(head)
    return Direction(positions, *pull(map, x[positions]))


def _shares(head: PooledHead, x: Tensor) -> Tensor:
    """Return the share of each value [t, d] in the pooled vector; the tokens of one text are all real."""
    match head.how:
        case "mean":
            return torch.full_like(x, 1 / len(x))
        case "max":
            return torch.zeros_like(x).scatter(0, x.argmax(dim=0, keepdim=True), 1.0)
        case "first" | "last":
            share = torch.zeros_like(x)
            share[0 if head.how == "first" else -1] = 1
            return share


def _freeze_pooled(head: PooledHead, y: Tensor, index: int) -> Affine:
    """Return an output of a head that pools tokens, as a map from the pooled vector y."""
    maps = list[Affine]()
    for one in (head.transform, *((*head.layers, head.project) if isinstance(head, EmbeddingHead) else ())):
        maps.append(freeze(one, y))
        y = maps[-1](y)
    match head.last:
        case nn.Sequential():
            last = next(part for part in head.last if not isinstance(part, nn.Dropout))
            assert isinstance(last, nn.Linear)
            weight, bias = last.weight[index].double(), _bias(last, last.weight[:, 0])[index]
            maps.append(lambda x: x @ weight + bias)
        case UnitLength() | LearnedLength():
            factor = 1.0 if isinstance(head.last, UnitLength) else float((head.last.log_scale / 2).exp())
            length = float(y.norm().clamp(min=1e-12))
            maps.append(lambda x: x[index] * (factor / length))
        case _:
            maps.append(lambda x: x[index])
    return lambda x: reduce(lambda value, map: map(value), maps, x)


def _table_row(model: Transformer, head: VocabularyHead, index: int) -> Tensor:
    if head.format is not None:
        return head.format.dense(slice(index, index + 1))[0].double()
    table = model.table(model.target or model.source) if head.table is None else head.table
    assert table is not None
    return table[index].double()
