"""Mixture of experts: each token is read by the few feed-forwards that a router chooses (Shazeer et al. 2017).

Tokens are sorted by expert, so that an expert reads one run of rows; none is dropped, whatever the balance.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.layout import real
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.aux_outputs import TrackedModule
from anyformer.nn.context import Context
from anyformer.nn.dropout import Dropout

Way = Literal["kernel", "loop", "step", "gather"]
FEW = 64  # rows of which each may have its own copy of a matrix
TINY = 1e-20  # keeps a sum of vanishing scores from dividing by 0


class Choice(NamedTuple):
    """Which experts read each of m tokens, how much each counts, and how probable each of all n was."""

    experts: Tensor  # int [m, k]
    weights: Tensor  # [m, k]
    probabilities: Tensor  # [m, n]


class SoftmaxRouter(nn.Module):
    """The k largest of softmax(x W), as they are or so that they sum to 1."""

    def __init__(self, width: int, count: int, top_k: int, *, normalize: bool, bias: bool):
        super().__init__()
        self.linear = nn.Linear(width, count, bias=bias)
        self.top_k, self.normalize = top_k, normalize

    def forward(self, x: Tensor) -> Choice:
        probabilities = at_least_fp32(self.linear(x)).softmax(dim=-1)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Choice(experts, weights, probabilities)


class SigmoidRouter(TrackedModule):
    """The k largest of sigmoid(x W) + bias, weighted by the sigmoid; the bias follows the load (DeepSeek-V3)."""

    bias: Tensor

    def __init__(
        self,
        width: int,
        count: int,
        top_k: int,
        *,
        normalize: bool,
        scale: float,
        rate: float,
        groups: int,
        top_groups: int,
    ):
        super().__init__()
        self.linear = nn.Linear(width, count, bias=False)
        self.register_buffer("bias", torch.empty(count))
        self.top_k, self.normalize, self.scale, self.rate = top_k, normalize, scale, rate
        self.groups, self.top_groups = groups, top_groups

    def forward(self, x: Tensor) -> Choice:
        scores = at_least_fp32(self.linear(x)).sigmoid()
        experts = self._eligible(scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        return Choice(experts, weights * self.scale, scores / (scores.sum(dim=-1, keepdim=True) + TINY))

    def _eligible(self, ranks: Tensor) -> Tensor:
        """The ranks of the experts in the best groups, -inf elsewhere."""
        if self.top_groups == self.groups:
            return ranks
        grouped = ranks.unflatten(-1, (self.groups, -1))  # [m, groups, n/groups]
        two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        best = two.topk(self.top_groups, dim=-1).indices
        out = torch.ones_like(two, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(out[..., None], -torch.inf).flatten(-2)

    def update_buffers(self, statistics: Tensor) -> None:
        self.bias.add_(self.rate * (statistics.mean() - statistics).sign())

    def reset(self) -> None:
        self.bias.zero_()


class Runs(NamedTuple):
    """Rows in order of the expert that reads them."""

    experts: Tensor  # of each row, int [r]
    lengths: Tensor  # how many rows each expert reads, int [n]


class StackedLinear(nn.Module):
    """A linear layer for each expert, of one or several parts; each reads its own run of rows."""

    def __init__(self, count: int, width: int, parts: tuple[int, ...], bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, sum(parts), width))
        self.bias = nn.Parameter(torch.empty(count, sum(parts))) if bias else None
        self.count, self.parts = count, parts

    def forward(self, x: Tensor, runs: Runs) -> tuple[Tensor, ...]:
        device = x.device.type  # autocast: as a linear layer would
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = run_products(x.to(dtype), self.weight.to(dtype), runs)
        if self.bias is not None:
            y = y + self.bias[runs.experts].to(y.dtype)
        return y.split(self.parts, dim=-1)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, bias={self.bias is not None}"


# -- products of runs, in four ways that must be equal ---------------------------------------------------------------


def run_products(x: Tensor, weight: Tensor, runs: Runs, way: Way | None = None) -> Tensor:
    """x W_eᵀ for each row [r, in] of x and its expert e; weights are [n, out, in]."""
    match way or _way(x, weight):
        case "kernel":
            return F.grouped_mm(x, weight.mT, offs=runs.lengths.cumsum(0).to(torch.int32))
        case "loop":
            return _loop(x, weight, runs.lengths)
        case "step":
            return _step(x, weight, runs.lengths)
        case "gather":
            return (weight[runs.experts] @ x[..., None])[..., 0]


def _way(x: Tensor, weight: Tensor) -> Way:
    """The kernel is for bf16 on GPUs, and rows of whole 16 bytes. A loop reads lengths on the host, which a compiled
    graph cannot: there it is one step of it; and which waits for a GPU: a few rows there read their own matrices."""
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if x.device.type == "cuda" and x.dtype is torch.bfloat16 and aligned:
        return "kernel"
    if x.device.type == "cuda" and x.shape[0] <= FEW and not torch.is_grad_enabled():
        return "gather"
    return "step" if torch.compiler.is_compiling() else "loop"


def _loop(x: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    pieces = x.split(lengths.tolist())
    return torch.cat([rows @ matrix.mT for rows, matrix in zip(pieces, weight, strict=True)])


_step = torch.library.custom_op("anyformer::run_products", _loop, mutates_args=())


@_step.register_fake
def _(x: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("anyformer::run_gradients", mutates_args=())
def _gradients(grad: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    """Of the weights, [n, out, in]."""
    sizes = lengths.tolist()
    return torch.stack([g.mT @ rows for g, rows in zip(grad.split(sizes), x.split(sizes), strict=True)])


@_gradients.register_fake
def _(grad: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(lengths.shape[0], grad.shape[1], x.shape[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, lengths = ctx.saved_tensors
    return _step(grad, weight.mT, lengths), _gradients(grad, x, lengths), None


_step.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

# -- the layer ------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Σ w_i(x) · F_i(x) over the chosen experts, plus the shared network, which reads every token."""

    def __init__(
        self,
        router: SoftmaxRouter | SigmoidRouter,
        up: StackedLinear,  # of a gated expert, the gate's rows and then up's
        down: StackedLinear,
        act: Callable[[Tensor], Tensor],
        *,
        dropout: float,
        shared: nn.Module | None,
        balance: float,
    ):
        super().__init__()
        self.router, self.up, self.down, self.shared = router, up, down, shared
        self.act, self.dropout, self.balance = act, Dropout(dropout), balance

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        rows = x.flatten(0, 1)  # [m, d]
        choice = self.router(rows)
        weights = self._shown(choice, x, ctx)
        if self.training and ctx.aux is not None:
            self._note(choice, x, ctx)
        y = self._read(rows, choice.experts).unflatten(0, (-1, choice.experts.shape[1]))  # [m, k, d]
        out = (y * weights[..., None].to(y.dtype)).sum(dim=1).view(x.shape)
        return out if self.shared is None else out + self.shared(x, ctx.scoped("shared"))

    def _read(self, rows: Tensor, experts: Tensor) -> Tensor:
        """What the chosen experts make of each token, [m·k, d]."""
        k, flat = experts.shape[1], experts.flatten()
        order = flat.argsort(stable=True)
        lengths = flat.new_zeros(self.up.count).scatter_add(0, flat, torch.ones_like(flat))
        runs = Runs(flat[order], lengths)
        # every row is taken once: gradients are added up in a fixed order, also on a GPU
        h = self.up(rows.repeat_interleave(k, dim=0).index_select(0, order), runs)
        h = self.act(h[0]) * h[1] if len(h) == 2 else self.act(h[0])
        (y,) = self.down(self.dropout(h), runs)
        return torch.empty_like(y).index_copy(0, order, y)

    def _shown(self, choice: Choice, x: Tensor, ctx: Context) -> Tensor:
        """The weights of the chosen [m, k], as taps leave them: they see those of all experts [b, t, n]."""
        if not ctx.is_tapped("router"):
            return choice.weights
        every = torch.zeros_like(choice.probabilities).scatter(-1, choice.experts, choice.weights)
        every = every.unflatten(0, x.shape[:2])
        changed = ctx.tap("router", every)
        return choice.weights if changed is every else changed.flatten(0, 1).gather(-1, choice.experts)

    def _note(self, choice: Choice, x: Tensor, ctx: Context) -> None:
        """The load of each expert, for the router's bias, and the balance of loads, for the loss; pads do not count."""
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
            mean = counted @ p / ctx.aux.reduce(counted.sum()).clamp(min=1)  # what this process adds to it
            ctx.aux.losses.append(self.balance * len(load) * (share * mean).sum())
