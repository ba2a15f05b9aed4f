"""Weights and evaluations of training jobs, for tests of the loop."""

from typing import Any

import torch
from torch import Tensor

from anyformer.recipe import Adam
from anyformer.training.loop import Job

SMOOTH = Adam(lr=1e-2, eps=1e-2)  # a large eps: rounding of tiny gradients does not decide signs


def parameters(job: Job) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in job.model.named_parameters()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def tell(job: Job, losses: list[float]) -> None:
    """Evaluations that find these losses."""
    evaluate, found = job.task.evaluate, iter(losses)

    def told(*args: Any) -> Any:
        metrics = evaluate(*args)
        metrics.values["loss"] = next(found)
        return metrics

    job.task.evaluate = told
