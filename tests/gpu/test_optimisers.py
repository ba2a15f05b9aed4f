"""Optimisers on a GPU: captured steps equal eager ones, and Newton–Schulz in bf16 is near that in fp64."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from anyformer.config import io
from anyformer.recipe import SGD, Adafactor, Crops, Muon, Optimizer
from anyformer.training.muon import orthogonalise
from anyformer.training.prepare import prepare
from anyformer.training.step import TrainingStep, set_learning_rate
from anyformer.training.step_graphs import WARMUP_STEPS
from tests.training.small import text

STEPS = WARMUP_STEPS + 5
HUGE = 3e38  # a weight with which no sum is finite


def trained(optimizer: Optimizer, folder: Path, *, captured: bool, bad: int) -> dict[str, torch.Tensor]:
    """Return the weights, averages and momenta after some steps, one of them not finite."""
    torch.compiler.reset()
    folder.mkdir()
    recipe = io.override(text(folder, Crops(rows=4, length=16), ema=0.9, clip=1.0, optimizer=optimizer), [])
    job = prepare(recipe, folder / "run", resume=False, console=Console(quiet=True))
    take_step = TrainingStep(job)
    assert take_step.graphs is not None
    for number in range(STEPS):
        if not captured:
            take_step.graphs.seen.clear()
        set_learning_rate(job, 1e-2 / (1 + number))
        batch, job.state.cursor = job.loader.read(job.state.cursor)
        weight = next(p for name, p in job.model.named_parameters() if name.endswith("qkv.weight"))
        before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        if number == bad:
            weight.data.fill_(HUGE)
        take_step([batch._replace(documents=64)])[1].read()
        if number == bad:
            weight.data.copy_(next(x for name, x in before.items() if name.endswith("qkv.weight")))
            assert all(torch.equal(p, before[name]) for name, p in job.model.named_parameters())
    assert bool(take_step.graphs.graphs) == captured
    found = {name: p.detach() for name, p in job.model.named_parameters()}
    found |= {f"ema.{name}": x for name, x in job.state.ema.items()}
    for i, state in enumerate(job.optimizer.state.values()):
        found |= {f"{name}.{i}": x for name, x in state.items()}
    return found


@pytest.mark.parametrize("bad", [0, STEPS - 2])
@pytest.mark.parametrize("optimizer", [Muon(lr=1e-2), SGD(lr=1e-2)], ids=["muon", "sgd"])
def test_captured_steps_equal_eager_ones(optimizer: Optimizer, bad: int, tmp_path: Path) -> None:
    eager, replayed = (
        trained(optimizer, tmp_path / str(captured), captured=captured, bad=bad) for captured in (False, True)
    )
    assert eager.keys() == replayed.keys()
    for name, x in eager.items():
        torch.testing.assert_close(replayed[name], x, rtol=1e-2, atol=1e-4, msg=lambda why, name=name: f"{name}: {why}")
        assert x.isfinite().all()


def test_adafactor_trains_without_a_graph(tmp_path: Path) -> None:
    job = prepare(text(tmp_path, optimizer=Adafactor()), tmp_path / "run", resume=False, console=Console(quiet=True))
    take_step = TrainingStep(job)
    assert take_step.graphs is None
    batch, _ = job.loader.read(job.state.cursor)
    losses = [take_step([batch])[1].read()[0] for _ in range(10)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("shape", [(4, 384, 384), (2, 384, 1536), (2, 1536, 384)])
def test_orthogonal_updates_in_half_precision(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device="cuda")
    values = torch.linalg.svdvals(orthogonalise(x, torch.bfloat16).double())
    assert values.quantile(0.05) > 0.3  # five iterations leave the smallest of a square matrix below
    assert values.max() < 1.4
    exact = orthogonalise(x.double(), torch.double)
    half = orthogonalise(x, torch.bfloat16).double()
    assert (half - exact).norm() < 0.05 * exact.norm()
