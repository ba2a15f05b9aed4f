"""Exponential moving average of the weights: its update, and a context with the averaged weights in the model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from anyformer.kernels.private import move_towards
from anyformer.nn.model import Transformer
from anyformer.training.job import Job


@torch.no_grad()
def update_ema(job: Job, share: float | Tensor) -> None:
    """Move the average towards the weights by `share`, a float or a scalar on the device."""
    if not job.state.ema:
        job.state.ema = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        return
    averages = [job.state.ema[name] for name, _ in job.model.named_parameters()]
    weights = [p.detach() for p in job.model.parameters()]
    if isinstance(share, float):
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight, share)
        return
    move_towards(averages, weights, share)


@contextmanager
def ema_weights(job: Job) -> Iterator[None]:
    """Run the block with the averaged weights in the model, if there are any."""
    if not job.state.ema:
        yield
        return
    weights = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    _load(job.model, job.state.ema)
    try:
        yield
    finally:
        _load(job.model, weights)


@torch.no_grad()
def _load(model: Transformer, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
