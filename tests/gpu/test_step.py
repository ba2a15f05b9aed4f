"""A step that is replayed from a CUDA graph equals the same step without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from anyformer.data.batch import Batch
from anyformer.recipe import Classify, Crops, Packed, Padded, Recipe
from anyformer.training.job import Job
from anyformer.training.prepare import prepare
from anyformer.training.step import TrainingStep, set_learning_rate
from anyformer.training.step_graphs import WARMUP_STEPS
from tests.training.small import labelled, pairs, parities, text

STEPS = WARMUP_STEPS + 5
HUGE = 3e38  # a weight with which no sum is finite


def recipe(kind: str, folder: Path) -> Recipe:
    settings: dict[str, Any] = {"ema": 0.9, "clip": 1.0}
    if kind == "packed":
        return pairs("encoder-decoder", Packed(tokens=64, length=32), valid=None, **settings)
    if kind == "few shapes":
        made = labelled(folder, Classify(), parities(), compile="off", **settings)
        return Recipe(**{**dict(made), "batches": Padded(tokens=64, few_shapes=True)})
    return text(folder, Crops(rows=4, length=16), **settings)


def trained(kind: str, folder: Path, *, captured: bool, accumulate: int, bad: int) -> tuple[list[Any], Job]:
    """Return loss and gradient norm of each step, one of them not finite, and the job after them."""
    torch.compiler.reset()
    folder.mkdir()
    job = prepare(recipe(kind, folder), folder / "run", resume=False, console=Console(quiet=True))
    assert job.compiled == (kind != "few shapes")
    take_step, numbers, side = TrainingStep(job), [], f"{[*job.model.config.stacks][-1]}.blocks"
    assert take_step.graphs is not None
    for number in range(STEPS):
        if not captured:
            take_step.graphs.seen.clear()
        set_learning_rate(job, 1e-2 / (1 + number))
        batches: list[Batch] = []
        for _ in range(accumulate):
            batch, job.state.cursor = job.loader.read(job.state.cursor)
            batches.append(batch._replace(documents=64))
        weight = next(p for name, p in job.model.named_parameters() if side in name and p.dim() == 2)
        kept = weight.detach().clone()
        if number == bad:
            weight.data.fill_(HUGE)
        numbers.append(take_step(batches)[1].read())
        if number == bad:
            assert (weight == HUGE).all()
            weight.data.copy_(kept)
    assert bool(take_step.graphs.graphs) == captured
    return numbers, job


@pytest.mark.parametrize("kind", ["crops", "packed", "few shapes"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_captured_steps_equal_eager_ones(kind: str, accumulate: int, tmp_path: Path) -> None:
    """Losses, norms, weights, averages and dropout; the learning rate changes, and a step is skipped."""
    found = []
    for captured in (False, True):
        options: dict[str, Any] = {"captured": captured, "accumulate": accumulate, "bad": STEPS - 2}
        found.append(trained(kind, tmp_path / str(captured), **options))
    (plain, one), (replayed, other) = found
    torch.testing.assert_close(torch.tensor(replayed), torch.tensor(plain), equal_nan=True, rtol=1e-4, atol=1e-5)
    assert not torch.tensor(plain[STEPS - 2]).isfinite().all()
    assert torch.tensor(plain[STEPS - 1]).isfinite().all()
    for ours, theirs in zip(other.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, x in other.state.ema.items():
        torch.testing.assert_close(x, one.state.ema[name], rtol=1e-4, atol=1e-5)
    steps = [{float(state["step"]) for state in job.optimizer.state.values()} for job in (one, other)]
    assert steps == [{STEPS - 1.0}] * 2
