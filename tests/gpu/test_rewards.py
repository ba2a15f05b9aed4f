"""The task grpo on a GPU: answers are those of a CPU, and a compiled step is that without compilation."""

from pathlib import Path

import pytest
import torch

from anyformer.config import io
from anyformer.data.loader import Cursor
from anyformer.recipe import Padded, PrefixReward, Recipe, Rewards
from anyformer.tasks.rewards import RewardedAnswers
from tests.training.small import make, metrics, pairs, run


def rewarded(folder: Path, **task: float) -> Recipe:
    """A recipe that starts from a run which is sometimes right, so that rewards differ."""
    run(pairs(dropout=0.0, valid=None, steps=300), folder / "first")
    spec = Rewards(max_target=6, samples=4, reward=PrefixReward(), **task)
    recipe = pairs(batches=Padded(tokens=256), dropout=0.0, valid=None, steps=3, init_from=str(folder / "first"))
    return recipe.model_copy(update={"task": spec})


def test_answers_are_those_of_a_cpu(tmp_path: Path) -> None:
    job = make(rewarded(tmp_path), tmp_path / "run")
    assert isinstance(job.task, RewardedAnswers)
    batch, _ = job.loader.read(Cursor())
    there = job.task.sample(job.model, batch, 0, 1)
    here = job.task.sample(job.model.cpu(), batch, 0, 1)
    assert torch.equal(there.ids.cpu(), here.ids)
    assert torch.equal(there.labels.cpu(), here.labels)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_compiled_step_equals_an_eager_one(tmp_path: Path, kl: float) -> None:
    """The first one: later steps sample from weights that differ by rounding."""
    recipe, firsts = rewarded(tmp_path, kl=kl), []
    for compile in ("off", "on"):
        torch.compiler.reset()
        run(io.override(recipe, [f"train.compile={compile}", "train.precision=bf16"]), tmp_path / compile)
        firsts.append(next(row for row in metrics(tmp_path / compile) if "reward" in row))
    assert firsts[0]["grad_norm"] > 0.01, "with equal rewards, gradients are rounding errors"
    assert firsts[1]["reward"] == firsts[0]["reward"]
    assert firsts[1]["grad_norm"] == pytest.approx(firsts[0]["grad_norm"], rel=0.05)
