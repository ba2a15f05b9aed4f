"""Mixture of experts: a router chooses a few feed-forward networks for each token (Shazeer et al. 2017).

Tokens are sorted by expert, so each expert reads consecutive rows. No token is dropped, whatever the load.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.layout import real
from anyformer.config import SigmoidTopK, SoftmaxTopK
from anyformer.kernels.cuda_graph import is_for_capture
from anyformer.kernels.runtime import Runtime, at_least_fp32
from anyformer.nn.aux_outputs import TrackedModule
from anyformer.nn.context import Context
from anyformer.nn.dropout import Dropout

ExpertKernel = Literal["grouped_mm", "loop", "opaque_loop", "gather"]
MAX_GATHERED_ROWS = 64  # each row has its own copy of a matrix
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


class ExpertRows(NamedTuple):
    """Which expert reads each of r rows, which are sorted by expert."""

    experts: Tensor  # int [r]
    lengths: Tensor  # number of rows of each expert, int [n]


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


# -- matmul per expert: four kernels with equal results ---------------------------------------------------------------


def expert_matmul(x: Tensor, weight: Tensor, rows: ExpertRows, kernel: ExpertKernel | None = None) -> Tensor:
    """Return x W_eᵀ for each row [r, in] of x and its expert e; weights are [n, out, in]."""
    match kernel or _choose_kernel(x, weight):
        case "grouped_mm":
            return F.grouped_mm(x, weight.mT, offs=rows.lengths.cumsum(0).to(torch.int32))
        case "loop":
            return _loop(x, weight, rows.lengths)
        case "opaque_loop":
            return _opaque_loop(x, weight, rows.lengths)
        case "gather":
            return (weight[rows.experts] @ x[..., None])[..., 0]


def _choose_kernel(x: Tensor, weight: Tensor) -> ExpertKernel:
    """Choose the fastest kernel that supports these tensors.

    grouped_mm is for bf16 with rows of whole 16 bytes, on GPUs of compute capability 9 and 10: elsewhere torch runs a
    loop. The loop reads lengths on the CPU. A compiled graph cannot do that, so there the loop is one opaque operator.
    On a GPU it waits for the device, so few rows gather their matrices instead.
    """
    is_gpu = x.device.type == "cuda"
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if is_gpu and x.dtype is torch.bfloat16 and aligned and _groups_on_device(x.device):
        return "grouped_mm"
    if is_gpu and x.shape[0] <= MAX_GATHERED_ROWS and not torch.is_grad_enabled():
        return "gather"
    return "opaque_loop" if torch.compiler.is_compiling() else "loop"


def _groups_on_device(device: torch.device) -> bool:
    """Return whether grouped_mm reads its offsets on the device; the host cannot while a graph is captured."""
    return torch.cuda.get_device_properties(device).major in (9, 10)


def _loop(x: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    """Multiply expert by expert; in a captured step, where the host cannot read lengths, all rows by all experts.

    The operator of a compiled graph decides this whenever it runs.
    """
    if is_for_capture():
        experts = torch.repeat_interleave(lengths, output_size=len(x))
        every = F.linear(x, weight.flatten(0, 1)).unflatten(1, weight.shape[:2])  # [r, n, out]
        return every[torch.arange(len(x), device=x.device), experts]
    pieces = x.split(lengths.tolist())
    return torch.cat([rows @ matrix.mT for rows, matrix in zip(pieces, weight, strict=True)])


_opaque_loop = torch.library.custom_op("anyformer::expert_matmul", _loop, mutates_args=())


@_opaque_loop.register_fake
def _(x: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("anyformer::expert_weight_grad", mutates_args=())
def _weight_grad(grad: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    """Return the gradient of the weights, [n, out, in]."""
    sizes = lengths.tolist()
    return torch.stack([g.mT @ rows for g, rows in zip(grad.split(sizes), x.split(sizes), strict=True)])


@_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(lengths.shape[0], grad.shape[1], x.shape[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, lengths = ctx.saved_tensors
    return _opaque_loop(grad, weight.mT, lengths), _weight_grad(grad, x, lengths), None


_opaque_loop.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

# -- the layer ------------------------------------------------------------------------------------------------------


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
        self.act, self.dropout, self.balance = act, Dropout(dropout), balance

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
        (y,) = self.down(self.dropout(self.act(*h)), of_experts)
        return torch.empty_like(y).index_copy(0, order, y)

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
