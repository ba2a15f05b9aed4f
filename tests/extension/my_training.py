"""An optimiser, a schedule and a logger as a user writes them."""

from typing import Annotated, Literal

import torch
from pydantic import Field

from anyformer.recipe import Logger, Optimizer, Schedule


class Lion(Optimizer):
    """The sign of a momentum (Chen et al. 2023)."""

    kind: Literal["lion"] = "lion"
    betas: tuple[float, float] = (0.9, 0.99)  # of the update, and of the momentum
    weight_decay: float = 0.0  # decay of matrices per step, times the learning rate

    def build(self, weights):
        return LionSteps(weights.groups(self.weight_decay), {"lr": self.lr, "betas": self.betas})

    def state(self, weights):
        return weights.values


class LionSteps(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * momentum.lerp(p.grad, 1 - fast).sign())
                momentum.lerp_(p.grad, 1 - slow)


class Signs(Optimizer):
    """The sign of the gradient, which needs no memory (Bernstein et al. 2018)."""

    kind: Literal["signs"] = "signs"

    def build(self, weights):
        return SignSteps(weights.groups(), {"lr": self.lr})

    def state(self, weights):
        return 0


class SignSteps(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * p.grad.sign())


class Power(Schedule):
    """A power of the share of the steps that is left."""

    kind: Literal["power"] = "power"
    power: Annotated[float, Field(gt=0)] = 2.0  # 1: a line

    def factor(self, step, steps):
        return ((steps - step) / (steps - self.warmup)) ** self.power


class Csv(Logger):
    """Losses in a table that a spreadsheet reads."""

    kind: Literal["csv"] = "csv"
    column: str = "loss"  # the metric

    def open(self, path, step):
        file = path.with_suffix(".csv")
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        to = file.open("w")
        to.writelines(line for line in lines if int(line.partition(",")[0]) <= step)
        return to

    def write(self, to, step, values):
        if self.column in values:
            to.write(f"{step},{values[self.column]}\n")
