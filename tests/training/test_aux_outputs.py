"""What training moves beside the weights: running statistics, a router's bias, terms of the loss."""

import math
from pathlib import Path

import torch

from anyformer.config import io
from anyformer.recipe import Recipe
from anyformer.runs.run import load
from anyformer.training.step import TrainingStep
from tests.training.small import assert_same_run, make, pairs, run, stop_at

BATCH = "model.decoder.blocks.*.norm=batch"


def experts(balance: float, rate: float = 0.0) -> str:
    router = f'{{kind="sigmoid", rate={rate}}}'
    inner = f'count=4, top_k=1, expert={{kind="plain", width=8}}, balance={balance}, router={router}'
    return f'model.decoder.blocks.*.feedforward={{kind="experts", {inner}}}'


def changed(recipe: Recipe, *changes: str) -> Recipe:
    return io.override(recipe, list(changes))


def test_a_step_moves_what_no_gradient_moves(tmp_path: Path) -> None:
    job = make(changed(pairs(), BATCH, experts(0.0, rate=0.5)), tmp_path / "run")
    before = {name: x.clone() for name, x in job.model.named_buffers()}
    batch, _ = job.loader.read(job.state.cursor)
    TrainingStep(job)([batch])
    moved = {name for name, x in job.model.named_buffers() if not torch.equal(x, before[name])}
    assert moved == before.keys()
    assert any("mean" in name for name in moved)


def test_a_bad_step_moves_nothing(tmp_path: Path) -> None:
    job = make(changed(pairs(), BATCH, experts(0.0, rate=0.5)), tmp_path / "run")
    with torch.no_grad():
        next(job.model.head.parameters()).fill_(torch.nan)
    before = {name: x.clone() for name, x in job.model.named_buffers()}
    batch, _ = job.loader.read(job.state.cursor)
    assert not math.isfinite(sum(TrainingStep(job)([batch])[1].read()))
    assert all(torch.equal(x, before[name]) for name, x in job.model.named_buffers())


def test_balance_is_learnt_and_not_told(tmp_path: Path) -> None:
    """The term moves the router; the loss that is logged is that of the tokens."""
    ways = {}
    for balance in (0.0, 5.0):
        job = make(changed(pairs(dropout=0.0), experts(balance)), tmp_path / str(balance))
        batch, _ = job.loader.read(job.state.cursor)
        total, _ = TrainingStep(job)([batch])[1].read()
        ways[balance] = total, {name: x.clone() for name, x in job.model.named_parameters()}
    assert ways[0.0][0] == ways[5.0][0]
    routers = [name for name in ways[0.0][1] if "router" in name]
    assert routers
    assert all(not torch.equal(ways[0.0][1][name], ways[5.0][1][name]) for name in routers)


def test_an_interruption_changes_nothing(tmp_path: Path) -> None:
    recipe = changed(pairs(checkpoint_activations=True, accumulate=2), BATCH, experts(0.1, rate=0.01))
    run(recipe, tmp_path / "straight")
    assert stop_at(recipe, tmp_path / "stopped", 9)
    run(recipe, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


def test_what_was_seen_is_loaded(tmp_path: Path) -> None:
    trained = run(changed(pairs(), BATCH), tmp_path / "run")
    again = load(tmp_path / "run")
    for (name, x), (_, y) in zip(trained.model.named_buffers(), again.model.named_buffers(), strict=True):
        assert torch.equal(x.cpu(), y.cpu()), name
