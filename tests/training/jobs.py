"""Weights and evaluations of training jobs, for tests of the loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from anyformer.recipe import Adam
from anyformer.training.job import Job
from anyformer.training.objective import Objective

SMOOTH = Adam(lr=1e-2, eps=1e-2)  # a large eps: rounding of tiny gradients does not decide signs


def parameters(job: Job) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in job.model.named_parameters()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@contextmanager
def changed_loss(change: Callable[[int], float]) -> Iterator[None]:
    """Multiply the training loss of each batch by a factor of its number, counted from 1; the factor may raise."""
    forward, count = Objective.forward, 0

    def changed(objective: Objective, *arguments: Any) -> tuple[Tensor, ...]:
        nonlocal count
        count += 1
        loss, *rest = forward(objective, *arguments)
        return loss * change(count), *rest

    with mock.patch.object(Objective, "forward", changed):
        yield


def set_losses(job: Job, losses: list[float]) -> None:
    """Let the evaluations of a job return these losses."""
    evaluate, remaining = job.task.evaluate, iter(losses)

    def with_loss(*args: Any) -> Any:
        metrics = evaluate(*args)
        metrics.values["loss"] = next(remaining)
        return metrics

    job.task.evaluate = with_loss
