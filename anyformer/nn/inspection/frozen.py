"""Norms and output heads as linear maps: everything that is not linear is frozen at the values of one forward pass.

A frozen norm divides by the actual deviation. A frozen activation f multiplies by the actual gain f(z) / z, and so do a
soft cap and a tanh in place of a norm. For that pass the map has the same output as the module, and its output is a
sum over the terms of its input.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

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


class FrozenNorm(NamedTuple):
    """z ↦ gain · (z - mean(z)) + shift, without the mean if not `centred`; for vectors [n, d]."""

    gain: Tensor  # [n, d] or [d]
    shift: Tensor  # [d]
    centred: bool

    def pull(self, u: Tensor) -> Tensor:
        """Return the direction [n, d] in the input that corresponds to a direction in the output."""
        u = u * self.gain
        return u - u.mean(dim=-1, keepdim=True) if self.centred else u

    def constant(self, u: Tensor) -> float:
        """Return the part of ⟨u, output⟩ that does not depend on the input."""
        return float((u * self.shift).sum())


def freeze_norm(norm: nn.Module, z: Tensor) -> FrozenNorm | None:
    """Return a norm with the statistics of its input z [n, d]; None for no norm."""
    z = z.double()
    match norm:
        case nn.Identity():
            return None
        case nn.LayerNorm():
            gain = norm.weight.double() * torch.rsqrt(z.var(dim=-1, correction=0, keepdim=True) + norm.eps)
            return FrozenNorm(gain, bias_of(norm, norm.weight), centred=True)
        case RootMeanSquare():
            scale = torch.rsqrt(z.square().mean(dim=-1, keepdim=True) + norm.eps)
            gain = (norm.weight.double() + norm.offset) * scale
            return FrozenNorm(gain, torch.zeros_like(norm.weight).double(), centred=False)
        case OverBatch():
            gain = norm.weight.double() * torch.rsqrt(norm.variance.double() + norm.eps)
            return FrozenNorm(gain, norm.bias.double() - norm.mean.double() * gain, centred=False)
        case ScaledTanh():
            alpha = norm.alpha.double()
            gain = norm.weight.double() * torch.where(z == 0, alpha, torch.tanh(alpha * z) / z)
            return FrozenNorm(gain, norm.bias.double(), centred=False)
        case _:
            raise _unknown(norm)


def _unknown(module: nn.Module) -> ConfigError:
    return ConfigError([Fault("run", f"its outputs are no sums of terms: {type(module).__name__} has no frozen form")])


def bias_of(layer: nn.Linear | nn.LayerNorm, like: Tensor) -> Tensor:
    """Return the bias of a layer in float64, or zeros if it has none."""
    bias: Tensor | None = layer.bias
    return torch.zeros_like(like, dtype=torch.float64) if bias is None else bias.double()


class Direction(NamedTuple):
    """One output of the head as ⟨u, x⟩ + constant, for the hidden states x at some positions."""

    positions: list[int]
    u: Tensor  # [n, d]
    constant: float

    @property
    def size(self) -> int:
        return len(self.positions)


@torch.no_grad()
def freeze_head(model: Transformer, hidden: Tensor, index: int, at: int) -> Direction:
    """Return output `index` of the head for hidden states [t, d] after the final norm.

    A head with an output for each token uses position `at` alone. A tag of a CRF is its score without transitions.
    """
    head, x = model.head, hidden.double()
    match head:
        case VocabularyHead():
            e = _transformed(head.transform, x[at])
            row, bias = _table_row(model, head, index), 0.0 if head.bias is None else float(head.bias[index])
            logit = float(e @ row) * head.scale + bias
            gain = 1.0 if head.cap is None or logit == 0 else head.cap * _tanh(logit / head.cap) / logit
            u, constant = _pull_transform(head.transform, x[at], gain * head.scale * row)
            return Direction([at], u[None], constant + gain * bias)
        case TokenHead() | SpanHead():
            row, bias = head.linear.weight[index].double(), float(head.linear.bias[index])
            u, constant = _pull_transform(head.transform, x[at], row)
            return Direction([at], u[None], constant + bias)
        case PooledHead():
            return _freeze_pooled(head, x, index)
        case HiddenHead():
            u = torch.zeros_like(x[:1])
            u[0, index] = 1
            return Direction([at], u, 0.0)
        case _:
            raise _unknown(head)


def _freeze_pooled(head: PooledHead, x: Tensor, index: int) -> Direction:
    """Return an output of a head that pools the tokens [t, d]; the tokens of one text are all real."""
    t = len(x)
    match head.how:
        case "mean":
            share = torch.full_like(x, 1 / t)
        case "max":
            share = torch.zeros_like(x).scatter(0, x.argmax(dim=0, keepdim=True), 1.0)
        case "first" | "last":
            share = torch.zeros_like(x)
            share[0 if head.how == "first" else -1] = 1
    pooled = (share * x).sum(dim=0)
    maps = [head.transform, *(_further(head) if isinstance(head, EmbeddingHead) else ())]
    read = [pooled]  # the input of each map, then the output of the last
    for one in maps:
        read.append(_transformed(one, read[-1]))
    y = read[-1]
    constant = 0.0
    u = torch.zeros_like(y)
    match head.last:
        case nn.Sequential():
            last = next(part for part in head.last if not isinstance(part, nn.Dropout))
            assert isinstance(last, nn.Linear)
            u, constant = last.weight[index].double(), float(bias_of(last, last.weight[:, 0])[index])
        case UnitLength() | LearnedLength():
            factor = 1.0 if isinstance(head.last, UnitLength) else float((head.last.log_scale / 2).exp())
            u[index] = factor / float(y.norm().clamp(min=1e-12))
        case _:
            u[index] = 1
    for one, x_in in zip(reversed(maps), reversed(read[:-1]), strict=True):
        u, more = _pull_transform(one, x_in, u)
        constant += more
    positions = [i for i in range(t) if bool(share[i].any())]
    return Direction(positions, share[positions] * u, constant)


def _further(head: EmbeddingHead) -> list[nn.Module]:
    return [*head.layers, head.project]


def _tanh(x: float) -> float:
    return float(torch.tanh(torch.tensor(x, dtype=torch.float64)))


def _table_row(model: Transformer, head: VocabularyHead, index: int) -> Tensor:
    if head.format is not None:
        return head.format.dense(slice(index, index + 1))[0].double()
    table = model.table(model.target or model.source) if head.table is None else head.table
    assert table is not None
    return table[index].double()


def _transformed(transform: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a head's transform for one vector, in float64."""
    match transform:
        case nn.Identity():
            return x
        case nn.Linear():
            return transform.weight.double() @ x
        case DenseTransform():
            _, a = _dense(transform, x)
            norm = freeze_norm(transform.norm, a[None])
            return a if norm is None else (norm.gain * (a - a.mean() * norm.centred) + norm.shift)[0]
        case _:
            raise _unknown(transform)


def _dense(transform: DenseTransform, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a dense layer before and after its activation."""
    linear = transform.linear
    z = linear.weight.double() @ x + bias_of(linear, linear.weight[:, 0])
    return z, transform.act(z)


def _pull_transform(transform: nn.Module, x: Tensor, u: Tensor) -> tuple[Tensor, float]:
    """Return the direction in the input of a transform for one in its output, and the constant."""
    match transform:
        case nn.Identity():
            return u, 0.0
        case nn.Linear():
            return u @ transform.weight.double(), 0.0
        case DenseTransform():
            z, a = _dense(transform, x)
            norm, constant = freeze_norm(transform.norm, a[None]), 0.0
            if norm is not None:
                constant, u = norm.constant(u), norm.pull(u)[0]
            small = z.abs() < 1e-12  # no gain: f(0) counts as a constant
            constant += float((u * a)[small].sum())
            u = u * torch.where(small, 0, a / torch.where(small, 1, z))
            constant += float(u @ bias_of(transform.linear, u))
            return u @ transform.linear.weight.double(), constant
        case _:
            raise _unknown(transform)
