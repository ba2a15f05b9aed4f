"""Feed-forward layers: the same small network at every position."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.config import Activation
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear


def join_gate(
    gate: Tensor, up: Tensor, *, act: Callable[[Tensor], Tensor], limit: float | None, offset: float
) -> Tensor:
    """Return act(gate) ⊙ (up + offset), both halves limited if there is a limit."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return act(gate) * (up + offset if offset else up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) ⊙ up: the usual gate, which some kernels compute."""
    return F.silu(gate) * up


class PlainFFN(nn.Module):
    """act(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017)."""

    def __init__(self, width: int, hidden: int, spec: Activation, bias: bool, dropout: float):
        super().__init__()
        self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.activation, self.act, self.dropout = spec, spec.function(), nn.Dropout(dropout)
        self.drops = dropout > 0  # a compiler with dynamic shapes would trace twice where it reads `dropout.p`

    def residual_weights(self) -> Iterator[Tensor]:
        yield self.down.rows()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        h = ctx.tap("hidden", self.lift(x))  # [b, t, d] -> [b, t, f]
        return self.down(self.dropout(h))  # [b, t, f] -> [b, t, d]

    def lift(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))


class GatedFFN(nn.Module):
    """(act(x W_gate) ⊙ x W_up) W_down (Shazeer 2020); `act` joins the two halves."""

    def __init__(self, width: int, hidden: int, act: Callable[[Tensor, Tensor], Tensor], bias: bool, dropout: float):
        super().__init__()
        self.gate_up = Linear(width, (hidden, hidden), bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.act, self.dropout = act, nn.Dropout(dropout)

    def residual_weights(self) -> Iterator[Tensor]:
        yield self.down.rows()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # [b, t, d] -> twice [b, t, f]
        h = ctx.tap("hidden", self.act(gate, up))
        return self.down(self.dropout(h))  # [b, t, f] -> [b, t, d]
