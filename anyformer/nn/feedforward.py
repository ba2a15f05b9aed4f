"""Feed-forward layers: the same small network at every position."""

from collections.abc import Callable
from functools import partial
from typing import assert_never

from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import (
    Activation,
    Experts,
    FeedForward,
    Gated,
    Gelu,
    Identity,
    LeakyRelu,
    Network,
    NoFeedForward,
    Plain,
    QuickGelu,
    Relu,
    Sigmoid,
    SigmoidTopK,
    Silu,
    SoftmaxTopK,
    SquaredRelu,
    Tanh,
    hidden_width,
)
from anyformer.kernels.elementwise import can_gate, silu_gate
from anyformer.kernels.fused_activation import Act
from anyformer.kernels.gelu import gelu
from anyformer.kernels.runtime import runs_fused
from anyformer.nn.context import Context
from anyformer.nn.dropout import Dropout
from anyformer.nn.experts import Mixture, SigmoidRouter, SoftmaxRouter, StackedLinear
from anyformer.nn.linear import Linear, in_fused_step, project


def activation(spec: Activation) -> Callable[[Tensor], Tensor]:
    """Return the function of an activation."""
    match spec:
        case Identity():
            return lambda x: x
        case Relu():
            return F.relu
        case LeakyRelu(slope=slope):
            return partial(F.leaky_relu, negative_slope=slope)
        case SquaredRelu():
            return lambda x: F.relu(x).square()
        case Sigmoid():
            return F.sigmoid
        case Tanh():
            return F.tanh
        case Gelu(approximate=approximate):
            return partial(gelu, approximate=approximate)
        case QuickGelu():
            return lambda x: x * F.sigmoid(1.702 * x)
        case Silu():
            return F.silu
        case _:
            assert_never(spec)


def gated_activation(spec: Gated) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that joins the gate and the linear half of a gated network."""
    if isinstance(spec.activation, Silu) and spec.limit is None and not spec.offset:
        return join_silu_gate
    return partial(join_gate, act=activation(spec.activation), limit=spec.limit, offset=spec.offset)


def join_silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) ⊙ up; by one kernel in evaluation on a GPU."""
    return silu_gate(gate, up) if runs_fused(gate) and can_gate(gate, up) else F.silu(gate) * up


def join_gate(
    gate: Tensor, up: Tensor, *, act: Callable[[Tensor], Tensor], limit: float | None, offset: float
) -> Tensor:
    """Return act(gate) ⊙ (up + offset), both halves limited if there is a limit."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return act(gate) * (up + offset if offset else up)


def act_of(spec: Activation) -> Act | None:
    """Return the name of an activation that can be fused with the matmul before it, else None."""
    match spec:
        case Relu():
            return "relu"
        case Gelu(approximate=approximate):
            return "gelu" if approximate == "none" else "gelu_tanh"
        case _:
            return None


class PlainFFN(nn.Module):
    """act(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017)."""

    def __init__(self, width: int, hidden: int, spec: Activation, bias: bool, dropout: float):
        super().__init__()
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.act, self.dropout = activation(spec), Dropout(dropout)
        self.quick = None if dropout else act_of(spec)  # dropout would need a separate pass

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        h = ctx.tap("hidden", self.lift(x))
        return self.down(self.dropout(h))

    def lift(self, x: Tensor) -> Tensor:
        if self.quick is not None and self.up.fuses_activation and in_fused_step(self.up, x):
            return self.up.activated(x, self.quick)
        return self.act(self.up(x))


class GatedFFN(nn.Module):
    """(act(x W_gate) ⊙ x W_up) W_down (Shazeer 2020); `act` joins the two halves."""

    def __init__(self, width: int, hidden: int, act: Callable[[Tensor, Tensor], Tensor], bias: bool, dropout: float):
        super().__init__()
        self.gate_up = Linear(width, (hidden, hidden), bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.act, self.dropout = act, Dropout(dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        if ctx.fuse_first is not None:
            return project(self.down, self.gate_up.fused_row(x, ctx.fuse_first._replace(gated=True)), ctx.fuse_last)
        gate, up = self.gate_up.split(x)
        h = ctx.tap("hidden", self.act(gate, up))
        return self.down(self.dropout(h))


def build_ffn(spec: FeedForward, width: int) -> nn.Module | None:
    """Return the module of a feed-forward, or None where there is none."""
    match spec:
        case NoFeedForward():
            return None
        case Plain() | Gated():
            return build_network(spec, width, hidden_width(spec, width))
        case Experts():
            return build_mixture(spec, width)
        case _:
            assert_never(spec)


def build_network(spec: Network, width: int, hidden: int) -> PlainFFN | GatedFFN:
    """Return a plain or gated network."""
    match spec:
        case Plain():
            return PlainFFN(width, hidden, spec.activation, spec.bias, spec.dropout)
        case Gated():
            return GatedFFN(width, hidden, gated_activation(spec), spec.bias, spec.dropout)
        case _:
            assert_never(spec)


def build_mixture(spec: Experts, width: int) -> Mixture:
    """Return the module of a mixture of experts."""
    one, hidden = spec.expert, hidden_width(spec.expert, width)
    parts = (hidden, hidden) if isinstance(one, Gated) else (hidden,)
    return Mixture(
        build_router(spec, width),
        StackedLinear(spec.count, width, parts, one.bias),
        StackedLinear(spec.count, hidden, (width,), one.bias),
        gated_activation(one) if isinstance(one, Gated) else activation(one.activation),
        dropout=one.dropout,
        shared=build_network(one, width, spec.shared * hidden) if spec.shared else None,
        shared_gate=nn.Linear(width, 1, bias=False) if spec.shared_gate else None,
        balance=spec.balance,
    )


def build_router(spec: Experts, width: int) -> SoftmaxRouter | SigmoidRouter:
    """Return the module that chooses the experts of each token."""
    match spec.router:
        case SoftmaxTopK() as router:
            return SoftmaxRouter(
                width,
                spec.count,
                spec.top_k,
                normalize=router.normalize,
                bias=router.bias,
                scale=router.scale,
                groups=router.groups,
                top_groups=router.top_groups,
            )
        case SigmoidTopK() as router:
            return SigmoidRouter(
                width,
                spec.count,
                spec.top_k,
                normalize=router.normalize,
                scale=router.scale,
                rate=router.rate,
                groups=router.groups,
                top_groups=router.top_groups,
            )
        case _:
            assert_never(spec.router)
