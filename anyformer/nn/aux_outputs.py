"""Auxiliary outputs of a training pass: terms of the loss, and statistics of the batch.

A forward pass updates no buffer, so that it can be repeated (activation checkpointing runs a block twice) and a step
with a non-finite gradient can be discarded. Modules add their statistics to `AuxOutputs`, and the model stores those of
the newest pass with each module. `collect` adds them to those of the step so far, for a step of several micro-batches;
`Transformer.commit` updates the buffers by all of them, once per step; `discard` drops them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Reduce = Callable[[Tensor], Tensor]  # the sum of a tensor over all processes that read parts of the same batch


class TrackedModule(nn.Module):
    """Module with buffers that training updates without a gradient: running statistics, a router's bias."""

    statistics: Tensor | None = None  # of the newest training pass
    collected: Tensor | None = None  # of the earlier passes of this step

    def collect(self) -> None:
        """Add the statistics of the newest pass to those of the step so far."""
        if self.statistics is not None:
            before = self.collected
            self.collected = self.statistics if before is None else self.merge(before, self.statistics)
            self.statistics = None

    def commit(self) -> None:
        """Update the buffers by the statistics of all passes since the last update."""
        self.collect()
        if self.collected is not None:
            self.update_buffers(self.collected)
            self.collected = None

    def discard(self) -> None:
        """Drop all statistics since the last update."""
        self.statistics = self.collected = None

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the statistics of two batches as those of one batch."""
        return one + other

    def update_buffers(self, statistics: Tensor) -> None:
        """Update the buffers by the statistics of a batch."""
        raise NotImplementedError

    def reset(self) -> None:
        """Set buffers and weights to their values before training."""
        raise NotImplementedError


def tracked_modules(model: nn.Module) -> Iterator[TrackedModule]:
    """Yield the modules whose buffers training updates."""
    return (module for module in model.modules() if isinstance(module, TrackedModule))


@torch.no_grad()
def collect(model: nn.Module) -> None:
    """Add the batch statistics of the last pass to those of the step: call it between the micro-batches of a step."""
    for module in tracked_modules(model):
        module.collect()


def discard(model: nn.Module) -> None:
    """Drop the batch statistics since the last `commit`, as those of a step with a non-finite loss."""
    for module in tracked_modules(model):
        module.discard()


def identity(x: Tensor) -> Tensor:
    """Return x: the sum over the processes of a run with one process."""
    return x


class AuxOutputs:
    """Auxiliary outputs of one forward pass.

    `reduce` returns the differentiable sum of a tensor over all processes that read parts of the same batch. Training
    with several processes passes a collective; the default is for one process. The class is neither a list nor a dict,
    because torch's wrappers (FSDP) copy those on the way to a block.
    """

    def __init__(self, reduce: Reduce = identity) -> None:
        self.reduce = reduce
        self.losses: list[Tensor] = []  # weighted terms to be added to the loss per token: this process's part
        self.statistics: dict[TrackedModule, Tensor] = {}

    def add(self, module: TrackedModule, statistics: Tensor) -> None:
        """Add statistics of a module; those of one that runs in several layers are summed."""
        before = self.statistics.get(module)
        self.statistics[module] = statistics if before is None else before + statistics

    def merge(self, losses: list[Tensor], statistics: dict[TrackedModule, Tensor]) -> None:
        """Add the outputs of a part of the pass."""
        self.losses.extend(losses)
        for module, own in statistics.items():
            self.add(module, own)

    def publish(self) -> None:
        """At the end of a pass, store the statistics with their modules; the losses stay here for the caller."""
        for module, own in self.statistics.items():
            module.statistics = own
        self.statistics = {}
