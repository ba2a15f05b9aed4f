"""Optimisers: their settings, what they store, and the work of a step. Imports no torch."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from anyformer.config import Part
from anyformer.config.spec import Positive, Probability

if TYPE_CHECKING:
    from torch.optim import Optimizer as TorchOptimizer

    from anyformer.training.optimizers import TrainedWeights

MUON_ITERATIONS = 5  # of Newton–Schulz

Decay = Annotated[float, Field(strict=True, ge=0)]


class HiddenMatrix(NamedTuple):
    """A weight of one or several equal matrices; fused projections count as one."""

    number: int
    rows: int
    columns: int

    @property
    def values(self) -> int:
        return self.number * self.rows * self.columns


@dataclass(frozen=True)
class WeightCounts:
    """Trained weights of a model, counted from its config. With an adapter none of them is a hidden matrix."""

    values: int
    find_hidden: Callable[[], Iterable[HiddenMatrix]] = tuple  # called if an optimiser needs it: it reads every layer
    tables: tuple[HiddenMatrix, ...] = ()  # of token embeddings

    @cached_property
    def hidden(self) -> tuple[HiddenMatrix, ...]:
        """The weights of linear layers and experts in all blocks."""
        return tuple(self.find_hidden())

    @property
    def hidden_values(self) -> int:
        return sum(matrix.values for matrix in self.hidden)


class Update(NamedTuple):
    """Work of a step of an optimiser on one GPU."""

    moved: float  # values of 4 bytes that it reads and writes
    flops: float = 0.0  # of matmuls
    kernels: int = 0  # beside the passes over all weights
    gathered: tuple[HiddenMatrix, ...] = ()  # matrices whose updates every GPU gathers where weights are divided


class Optimizer(Part):
    """A rule that changes the weights by their gradients."""

    # factor on the rate of hidden matrices by base width ÷ width (muP); None: no rule is known
    width_rate: ClassVar[Callable[[float], float] | None] = None
    needs_whole: ClassVar[bool] = False  # a step needs whole weights, which are not divided among processes

    lr: Positive  # peak learning rate

    @abstractmethod
    def build(self, weights: "TrainedWeights") -> "TorchOptimizer":
        """Return torch's optimiser of `weights.groups(decay)`, whose learning rates are set before each step.

        Its state for a weight, `state[p]`, has tensors of the shape of the weight, with sides of 1 in place of some, or
        single numbers. With a default `fused` it must obey `found_inf`, as torch's fused optimisers do.
        """

    @abstractmethod
    def state(self, weights: WeightCounts) -> int:
        """Return the number of values that are stored from step to step, without single numbers."""

    def update(self, weights: WeightCounts, own: float, parts: int) -> Update:
        """Return the work on a GPU that updates `own` of the weights, which are divided into some parts.

        By default each weight, its gradient and its state are read once, and all but the gradient are written.
        """
        return Update((3 + 2 * self.state(weights) / weights.values) * own)


class AdamW(Optimizer):
    """Adam with decoupled weight decay on matrices (Loshchilov & Hutter 2019)."""

    width_rate = float

    kind: Literal["adamw"] = "adamw"
    # decay of the moving averages of the gradient and of its square
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Positive = 1e-8  # added to the denominator of an update
    # decay of matrices per step, times the learning rate; norms and biases have none
    weight_decay: Decay = 0.1

    def build(self, weights: "TrainedWeights") -> "TorchOptimizer":
        from torch.optim import AdamW

        groups = weights.groups(self.weight_decay)
        return AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=weights.fused)

    def state(self, weights: WeightCounts) -> int:
        return 2 * weights.values


class Adam(Optimizer):
    """Adam with the settings of the 2017 Transformer (Kingma & Ba 2015)."""

    width_rate = float

    kind: Literal["adam"] = "adam"
    # decay of the moving averages of the gradient and of its square
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    eps: Positive = 1e-9  # added to the denominator of an update

    def build(self, weights: "TrainedWeights") -> "TorchOptimizer":
        from torch.optim import Adam

        return Adam(weights.groups(), lr=self.lr, betas=self.betas, eps=self.eps, fused=weights.fused)

    def state(self, weights: WeightCounts) -> int:
        return 2 * weights.values


class Muon(Optimizer):
    """Momentum whose update of each matrix is made orthogonal (Jordan et al. 2024), for linear layers of blocks.

    AdamW updates all other weights: vectors, embeddings, head, routers, recurrent cells, convolutions and adapters. An
    update has 0.2 · sqrt(larger side) times the learning rate, the size of an update of AdamW (Liu et al. 2025), so
    that one learning rate and one weight decay serve both.
    """

    width_rate = math.sqrt

    kind: Literal["muon"] = "muon"
    momentum: Probability = 0.95  # decay of the moving average of a matrix's gradient, with Nesterov's look-ahead
    adam_lr: Positive | None = None  # peak learning rate of the weights that AdamW updates; None: `lr`
    # of AdamW: decay of the moving averages of the gradient and of its square
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Positive = 1e-8  # of AdamW: added to the denominator of an update
    # decay of matrices per step, times the learning rate; norms and biases have none
    weight_decay: Decay = 0.1

    def build(self, weights: "TrainedWeights") -> "TorchOptimizer":
        from anyformer.training.muon import MuonOptimizer

        layouts = weights.layouts
        groups = weights.groups(self.weight_decay, kind=lambda p: p in layouts)
        for group in groups:
            is_hidden = group["params"][0] in layouts
            group["momentum"] = self.momentum if is_hidden else None
            group["lr_scale"] *= 1.0 if is_hidden else (self.adam_lr or self.lr) / self.lr
        return MuonOptimizer(groups, layouts, lr=self.lr, betas=self.betas, eps=self.eps, fused=weights.fused)

    def state(self, weights: WeightCounts) -> int:
        return 2 * weights.values - weights.hidden_values

    def update(self, weights: WeightCounts, own: float, parts: int) -> Update:
        """Momentum, look-ahead and the new weight of hidden matrices are computed by their own kernels.

        An iteration is three matmuls, of m×n, m×m and m×n by m×m, m being the smaller side, in half precision. Every
        GPU gathers all updates and makes all of them orthogonal, whatever the split.
        """
        hidden, flops = weights.hidden_values / parts, 0
        for one in weights.hidden:
            small, large = sorted((one.rows, one.columns))
            flops += one.number * MUON_ITERATIONS * (4 * small**2 * large + 2 * small**3)
        kernels = 40 * len({*weights.hidden})
        return Update(9.5 * hidden + 7 * (own - hidden), flops, kernels, weights.hidden)


class Adafactor(Optimizer):
    """Adam without momentum, whose mean squares of a matrix are stored as a row and a column (Shazeer & Stern 2018).

    At step t the rate is min(lr, 1/sqrt(t)) times the root mean square of the weight, which is at least 0.001. The root
    mean square of an update, before this rate, is at most 1.
    """

    needs_whole = True

    kind: Literal["adafactor"] = "adafactor"
    lr: Positive = 1e-2  # peak learning rate, relative to the size of each weight
    weight_decay: Decay = 0.0  # decay of matrices per step, times the learning rate; norms and biases have none

    def build(self, weights: "TrainedWeights") -> "TorchOptimizer":
        from torch.optim import Adafactor

        return Adafactor(weights.groups(self.weight_decay), lr=self.lr)

    def state(self, weights: WeightCounts) -> int:
        """An upper bound, because other matrices are factored, too."""
        factored = (*weights.hidden, *weights.tables)
        return weights.values - sum(one.values - one.number * (one.rows + one.columns) for one in factored)

    def update(self, weights: WeightCounts, own: float, parts: int) -> Update:
        """About six passes over the gradient and the weight, not fused."""
        return Update(12 * own)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013)."""

    kind: Literal["sgd"] = "sgd"
    momentum: Probability = 0.9  # factor of the last update in the next; 0: none
    weight_decay: Decay = 0.0  # times a matrix, added to its gradient; norms and biases have none

    def build(self, weights: "TrainedWeights") -> "TorchOptimizer":
        import torch

        fused = weights.fused and not weights.divided  # it has no kernel for divided weights
        groups = weights.groups(self.weight_decay)
        sgd = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, fused=fused)
        for p in (p for group in sgd.param_groups for p in group["params"] if self.momentum):
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)  # else a skipped first step leaves it undefined
        return sgd

    def state(self, weights: WeightCounts) -> int:
        return weights.values if self.momentum else 0
