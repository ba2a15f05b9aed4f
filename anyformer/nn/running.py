"""What a training pass leaves behind beside its output: terms of the loss, and what it saw of the batch.

A forward pass changes no module, so that it can be repeated (activation checkpointing runs a block twice) and a step
with a bad gradient can be dropped: parts put what they saw into `Notes`, the model keeps the newest with each of them,
and `Transformer.commit` lets it count, once per step.
"""

import torch
from torch import Tensor, distributed as dist, nn


class Running(nn.Module):
    """A module with numbers that no gradient moves, but what training sees: running statistics, a router's bias."""

    seen: Tensor | None = None  # by the last pass of training, until `commit`

    def commit(self) -> None:
        """Moves the numbers by what was seen, once."""
        if self.seen is not None:
            self.move(self.seen)
            self.seen = None

    def move(self, seen: Tensor) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """The numbers as they are before training."""
        raise NotImplementedError


class Notes:
    """Of one pass. Not a list or dict itself: torch's wrappers copy those on the way to a block."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []  # to be added to the loss per token; weighted; this process's part
        self.seen: dict[Running, Tensor] = {}

    def see(self, module: Running, seen: Tensor) -> None:
        """What is seen at several places where one module stands is added up."""
        self.seen[module] = self.seen[module] + seen if module in self.seen else seen

    def take(self, losses: list[Tensor], seen: dict[Running, Tensor]) -> None:
        """The notes of a part of the pass."""
        self.losses.extend(losses)
        for module, x in seen.items():
            self.see(module, x)

    def settle(self, asked: "Notes | None") -> None:
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
