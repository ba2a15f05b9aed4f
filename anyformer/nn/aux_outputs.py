"""Outputs of a training pass beside its result: auxiliary losses, and statistics of the batch.

A forward pass updates no buffer, so that it can be repeated (activation checkpointing runs a block twice) and a step
with a non-finite gradient can be discarded. Modules put their statistics into `Notes`, and the model stores those of
the newest pass with each module. `collect` adds them to those of the step so far, for a step of several micro-batches;
`Transformer.commit` updates the buffers by all of them, once per step; `discard` drops them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed as dist, nn


class TrackedModule(nn.Module):
    """Module with buffers that training updates without a gradient: running statistics, a router's bias."""

    seen: Tensor | None = None  # statistics of the newest training pass
    collected: Tensor | None = None  # statistics of the earlier passes of this step

    def collect(self) -> None:
        """Add the statistics of the newest pass to those of the step so far."""
        if self.seen is not None:
            self.collected = self.seen if self.collected is None else self.merge(self.collected, self.seen)
            self.seen = None

    def commit(self) -> None:
        """Update the buffers by the statistics of all passes since the last update."""
        self.collect()
        if self.collected is not None:
            self.move(self.collected)
            self.collected = None

    def discard(self) -> None:
        """Drop all statistics since the last update."""
        self.seen = self.collected = None

    def merge(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the statistics of two batches as those of one batch."""
        return one + other

    def move(self, seen: Tensor) -> None:
        """Update the buffers by the statistics of a batch."""
        raise NotImplementedError

    def reset(self) -> None:
        """Set the buffers to their values before training."""
        raise NotImplementedError


def running(model: nn.Module) -> Iterator[TrackedModule]:
    return (module for module in model.modules() if isinstance(module, TrackedModule))


@torch.no_grad()
def collect(model: nn.Module) -> None:
    """Keep the batch statistics of the last pass for `commit`: call it between the micro-batches of a step."""
    for module in running(model):
        module.collect()


def discard(model: nn.Module) -> None:
    """Drop the batch statistics since the last `commit`, as those of a step with a non-finite loss."""
    for module in running(model):
        module.discard()


class AuxOutputs:
    """Of one pass. Not a list or dict itself: torch's wrappers copy those on the way to a block."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []  # to be added to the loss per token; weighted; this process's part
        self.seen: dict[TrackedModule, Tensor] = {}

    def see(self, module: TrackedModule, seen: Tensor) -> None:
        """What is seen at several places where one module stands is added up."""
        self.seen[module] = self.seen[module] + seen if module in self.seen else seen

    def take(self, losses: list[Tensor], seen: dict[TrackedModule, Tensor]) -> None:
        """The notes of a part of the pass."""
        self.losses.extend(losses)
        for module, x in seen.items():
            self.see(module, x)

    def settle(self, asked: "AuxOutputs | None") -> None:
        """At the end of a pass: what was seen stays with the modules, the losses go to the notes of who asked."""
        for module, seen in self.seen.items():
            module.seen = seen
        if asked is not None:
            asked.losses.extend(self.losses)


def over_ranks(x: Tensor) -> Tensor:
    """The sum over all processes of a training, differentiable: a batch is what all of them read."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    from torch.distributed.nn import functional as collectives

    return collectives.all_reduce(x) if x.requires_grad else _summed(x)


@torch.no_grad()
def _summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x
