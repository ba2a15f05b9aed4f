"""Initialisation of a decay exp(-A softplus(x W + b)), shared by Mamba-2 and gated DeltaNet."""

import math

import torch
from torch import Tensor

TIME_STEPS = (1e-3, 1e-1)  # softplus(b) is log-uniform between them
MIN_RATE = 1e-4  # of A: its logarithm is the parameter


def reset_decay(log_a: Tensor, dt_bias: Tensor, rates: tuple[float, float]) -> None:
    """Draw A uniformly between `rates`, and b such that softplus(b) is log-uniform in `TIME_STEPS`."""
    log_a.uniform_(*rates).clamp_(min=MIN_RATE).log_()
    low, high = map(math.log, TIME_STEPS)
    step = dt_bias.uniform_(low, high).exp()
    dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
