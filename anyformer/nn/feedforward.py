"""Feed-forward layers: the same small network at every position."""

from collections.abc import Callable, Iterator
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import Activation
from anyformer.kernels.elementwise import can_gate, silu_gate
from anyformer.kernels.fused_activation import Act
from anyformer.kernels.runtime import runs_fused
from anyformer.nn.context import Context
from anyformer.nn.dropout import Dropout
from anyformer.nn.linear import Linear, in_fused_step, project


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


class PlainFFN(nn.Module):
    """act(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017)."""

    def __init__(self, width: int, hidden: int, spec: Activation, bias: bool, dropout: float):
        super().__init__()
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.act, self.dropout = spec.function(), Dropout(dropout)
        self.quick = None if dropout else cast(Act | None, spec.fused)  # dropout would need a separate pass

    def residual_weights(self) -> Iterator[Tensor]:
        yield self.down.rows()

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

    def residual_weights(self) -> Iterator[Tensor]:
        yield self.down.rows()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        if ctx.fuse_first is not None:
            return project(self.down, self.gate_up.fused_row(x, ctx.fuse_first._replace(gated=True)), ctx.fuse_last)
        gate, up = self.gate_up.split(x)
        h = ctx.tap("hidden", self.act(gate, up))
        return self.down(self.dropout(h))
