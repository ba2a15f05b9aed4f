"""The moving average of the weights: its update, and the model with it for evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from anyformer.nn.model import Transformer
from anyformer.training.checkpoint import TrainState


class Averageable(Protocol):
    """The parts of a training job that averaging needs."""

    model: Transformer
    state: TrainState


@torch.no_grad()
def average(job: Averageable, share: float | Tensor) -> None:
    """Move the average towards the weights by `share`, a number or a scalar on the device."""
    if not job.state.ema:
        job.state.ema = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        return
    own = [job.state.ema[name] for name, _ in job.model.named_parameters()]
    new = [p.detach() for p in job.model.parameters()]
    if isinstance(share, float):
        for x, y in zip(own, new, strict=True):
            x.lerp_(y, share)
        return
    torch._foreach_add_(own, torch._foreach_mul(torch._foreach_sub(new, own), share))


@contextmanager
def averaged(job: Averageable) -> Iterator[None]:
    """Run the block with the averaged weights in the model, where there are any."""
    if not job.state.ema:
        yield
        return
    own = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    _put(job.model, job.state.ema)
    try:
        yield
    finally:
        _put(job.model, own)


@torch.no_grad()
def _put(model: Transformer, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
