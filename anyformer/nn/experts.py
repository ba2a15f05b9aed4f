"""Mixture of experts: a router chooses a few feed-forward networks for each token (Shazeer et al. 2017).

Tokens are sorted by expert, so each expert reads consecutive rows. No token is dropped, whatever the load.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from anyformer.attention.layout import real
from anyformer.config import SigmoidTopK, SoftmaxTopK
from anyformer.kernels.expert_matmul import ExpertRows, expert_matmul
from anyformer.kernels.runtime import Runtime, at_least_fp32
from anyformer.nn.aux_outputs import TrackedModule
from anyformer.nn.context import Context

TINY = 1e-20  # avoids division by 0 if all scores vanish


class Routing(NamedTuple):
    """The router's choice for m tokens: k experts each, their weights, and the probabilities of all n experts."""

    experts: Tensor  # int [m, k]
    weights: Tensor  # [m, k]
    probabilities: Tensor  # [m, n]


def eligible(ranks: Tensor, groups: int, top_groups: int, best: int) -> Tensor:
    """Return the ranks [m, n] of experts in the best groups, by the sum of each group's `best`, and -inf for others."""
    if top_groups == groups:
        return ranks
    grouped = ranks.unflatten(-1, (groups, -1))  # [m, groups, n/groups]
    each = grouped.topk(min(best, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    out = torch.ones_like(each, dtype=torch.bool).scatter(-1, each.topk(top_groups, dim=-1).indices, False)
    return grouped.masked_fill(out[..., None], -torch.inf).flatten(-2)


class SoftmaxRouter(nn.Module):
    """The k largest of softmax(x W), optionally normalised to sum to 1."""

    def __init__(self, spec: SoftmaxTopK, width: int, count: int, top_k: int):
        super().__init__()
        self.linear = nn.Linear(width, count, bias=spec.bias)
        self.top_k, self.normalize, self.scale = top_k, spec.normalize, spec.scale
        self.groups, self.top_groups = spec.groups, spec.top_groups

    def forward(self, x: Tensor) -> Routing:
        probabilities = at_least_fp32(self.linear(x)).softmax(dim=-1)  # [m, d] -> [m, n]
        ranks = eligible(probabilities, self.groups, self.top_groups, best=1)
        weights, experts = ranks.topk(self.top_k, dim=-1)  # [m, top_k]
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routing(experts, weights if self.scale == 1 else weights * self.scale, probabilities)


class SigmoidRouter(TrackedModule):
    """The k largest of sigmoid(x W) + bias, weighted by the sigmoid; the bias follows the load (DeepSeek-V3)."""

    bias: Tensor

    def __init__(self, spec: SigmoidTopK, width: int, count: int, top_k: int):
        super().__init__()
        self.linear = nn.Linear(width, count, bias=False)
        self.register_buffer("bias", torch.empty(count))
        self.top_k, self.normalize, self.scale, self.rate = top_k, spec.normalize, spec.scale, spec.rate
        self.groups, self.top_groups = spec.groups, spec.top_groups

    def forward(self, x: Tensor) -> Routing:
        scores = at_least_fp32(self.linear(x)).sigmoid()  # [m, d] -> [m, n]
        ranks = eligible(scores.detach() + self.bias, self.groups, self.top_groups, best=2)
        experts = ranks.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        return Routing(experts, weights * self.scale, scores / (scores.sum(dim=-1, keepdim=True) + TINY))

    def update_buffers(self, statistics: Tensor) -> None:
        self.bias.add_(self.rate * (statistics.mean() - statistics).sign())

    def reset(self) -> None:
        self.bias.zero_()


class ExpertFormat(Protocol):
    """A weight format of stacked linear layers, other than plain."""

    def expert_matmul(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """Return x W_eᵀ for each row [r, in] of x and its expert e."""


class StackedLinear(nn.Module):
    """One linear layer per expert, each of one or several parts and applied to its own rows."""

    weight: nn.Parameter | None  # None: the format stores it
    bias: nn.Parameter | None

    def __init__(self, count: int, inputs: int, parts: tuple[int, ...], bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, sum(parts), inputs))
        self.bias = nn.Parameter(torch.empty(count, sum(parts))) if bias else None
        self.count, self.parts = count, parts
        self.format: ExpertFormat | None = None  # None: plain

    def forward(self, x: Tensor, rows: ExpertRows) -> tuple[Tensor, ...]:
        x = self.cast(x)
        if self.format is None:
            y = expert_matmul(x, self.rows().to(x.dtype), rows)  # [rows, in] -> [rows, out]
        else:
            y = self.format.expert_matmul(x, rows)
        if self.bias is not None:
            y = y + self.bias[rows.experts].to(y.dtype)
        return y.split(self.parts, dim=-1)

    def cast(self, x: Tensor) -> Tensor:
        """Return x in the data type of autocast where it is on, like the input of a linear layer."""
        return x.to(Runtime.of(x, self.training).dtype)

    def rows(self) -> Tensor:
        """Return the parameter, [n, out, in]."""
        assert self.weight is not None
        return self.weight

    def extra_repr(self) -> str:
        return f"count={self.count}, parts={self.parts}, bias={self.bias is not None}"


class ExpertMixture(nn.Module):
    """Σ w_i(x) · F_i(x) over the chosen experts i, plus the shared network, which reads every token."""

    def __init__(
        self,
        router: nn.Module,
        up: StackedLinear,  # a gated expert has two parts: gate, then up
        down: StackedLinear,
        act: Callable[..., Tensor],  # of the parts of `up`
        *,
        dropout: float,
        shared: nn.Module | None,
        shared_gate: nn.Module | None,
        balance: float,
    ):
        super().__init__()
        self.router, self.up, self.down, self.shared, self.shared_gate = router, up, down, shared, shared_gate
        self.act, self.dropout, self.balance = act, nn.Dropout(dropout), balance

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        rows = x.flatten(0, 1)  # [m, d]
        choice: Routing = self.router(rows)
        weights = self._tapped_weights(choice, x, ctx)
        if self.training and ctx.aux is not None:
            self._note(choice, x, ctx)
        out = self.combine(rows, choice.experts, weights).view(x.shape)
        if self.shared is None:
            return out
        shared = self.shared(x, ctx.scoped("shared"))
        return out + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())

    def residual_weights(self) -> Iterator[Tensor]:
        yield self.down.rows()

    def combine(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [m, d] of the outputs of k chosen experts for rows [m, d]."""
        k = experts.shape[1]
        # each row is read once, so gradients are summed in a fixed order, also on a GPU
        y = self.read(rows.repeat_interleave(k, dim=0), experts.flatten()).unflatten(0, (-1, k))  # [m, k, d]
        return (y * weights[..., None].to(y.dtype)).sum(dim=1)

    def read(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return the output [r, d] of one expert for each of the rows [r, d]."""
        order = experts.argsort(stable=True)
        lengths = experts.new_zeros(self.up.count).scatter_add(0, experts, torch.ones_like(experts))
        of_experts = ExpertRows(experts[order], lengths)
        h = self.up(rows.index_select(0, order), of_experts)
        (y,) = self.down(self.dropout(self.activate(*h)), of_experts)
        return torch.empty_like(y).index_copy(0, order, y)

    def activate(self, *parts: Tensor) -> Tensor:
        return self.act(*parts)

    def _tapped_weights(self, choice: Routing, x: Tensor, ctx: Context) -> Tensor:
        """Return the weights of the chosen experts [m, k] after the tap, which sees those of all experts [b, t, n]."""
        if ctx.taps is None or not ctx.taps.selects("router"):
            return choice.weights
        every = torch.zeros_like(choice.probabilities).scatter(-1, choice.experts, choice.weights)
        every = every.unflatten(0, x.shape[:2])  # [b, t, n]
        changed = ctx.tap("router", every)
        return choice.weights if changed is every else changed.flatten(0, 1).gather(-1, choice.experts)

    def _note(self, choice: Routing, x: Tensor, ctx: Context) -> None:
        """Record the load of each expert for the router's bias, and the balance loss. Padding does not count."""
        follows = isinstance(self.router, SigmoidRouter) and self.router.rate > 0
        if not follows and not self.balance:
            return
        p, segments = choice.probabilities, ctx.layout.segments
        counted = p.new_ones(len(p)) if segments is None else real(segments).expand(x.shape[:2]).flatten().to(p.dtype)
        k = choice.experts.shape[1]
        load = p.new_zeros(p.shape[1]).index_add(0, choice.experts.flatten(), counted.repeat_interleave(k))
        assert ctx.aux is not None
        load = ctx.aux.reduce(load)
        if isinstance(self.router, SigmoidRouter) and follows:
            ctx.aux.add(self.router, load)
        if self.balance:
            share = load / load.sum().clamp(min=1)
            mean = counted @ p / ctx.aux.reduce(counted.sum()).clamp(min=1)  # the share of this process
            ctx.aux.losses.append(self.balance * len(load) * (share * mean).sum())
