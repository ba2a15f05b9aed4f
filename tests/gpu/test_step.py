"""A step that is recorded and replayed does what the same step does kernel by kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from anyformer.data.batch import Batch
from anyformer.recipe import Crops, Packed, Recipe
from anyformer.training.loop import Job, compiles, learn, objective, set_rate
from anyformer.training.prepare import prepare
from anyformer.training.step_graphs import AFTER
from tests.training.small import pairs, text

STEPS = AFTER + 5
HUGE = 3e38  # a weight with which no sum is finite


def recipe(kind: str, folder: Path) -> Recipe:
    settings: dict[str, Any] = {"ema": 0.9, "clip": 1.0}
    if kind == "packed":
        return pairs("encoder-decoder", Packed(tokens=64, length=32), valid=None, **settings)
    return text(folder, Crops(rows=4, length=16), **settings)


def trained(kind: str, folder: Path, *, recorded: bool, accumulate: int, bad: int) -> tuple[list[Any], Job]:
    """The numbers of each step, of which one has no finite gradient; and the job after them."""
    torch.compiler.reset()
    folder.mkdir()
    job = prepare(recipe(kind, folder), folder / "run", resume=False, console=Console(quiet=True))
    assert job.recorder is not None
    assert compiles(job.recipe, job.device)
    run, numbers = objective(job), []
    for number in range(STEPS):
        if not recorded:
            job.recorder.seen.clear()
        set_rate(job, 1e-2 / (1 + number))
        batches: list[Batch] = []
        for _ in range(accumulate):
            batch, job.state.place = job.loader.read(job.state.place)
            batches.append(batch._replace(documents=64))
        weight = next(p for name, p in job.model.named_parameters() if "decoder.blocks" in name and p.dim() == 2)
        kept = weight.detach().clone()
        if number == bad:
            weight.data.fill_(HUGE)
        numbers.append(learn(job, run, batches)[1].read())
        if number == bad:
            assert (weight == HUGE).all()
            weight.data.copy_(kept)
    assert bool(job.recorder.recordings) == recorded
    return numbers, job


@pytest.mark.parametrize("kind", ["crops", "packed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_recorded_steps_are_the_same(kind: str, accumulate: int, tmp_path: Path) -> None:
    """Losses, norms, weights, averages and random numbers; the rate changes, and a step is skipped."""
    found = []
    for recorded in (False, True):
        options: dict[str, Any] = {"recorded": recorded, "accumulate": accumulate, "bad": STEPS - 2}
        found.append(trained(kind, tmp_path / str(recorded), **options))
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
