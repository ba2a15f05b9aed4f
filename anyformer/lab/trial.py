"""One training run as a measurement: settings, loss curve, last evaluation, and whether it diverged."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from anyformer.lab.cells import SCRATCH
from anyformer.nn.model import Transformer
from anyformer.recipe import Recipe
from anyformer.runs.processes import scratch
from anyformer.tasks.base import BuiltTask
from anyformer.training.job import Job
from anyformer.training.log import read_metrics
from anyformer.training.loop import Diverged, fit
from anyformer.training.machine import flops_per_token
from anyformer.training.make_task import make_task
from anyformer.training.prepare import build, fit_rows, prepare, read_rows
from anyformer.training.signals import Signals
from anyformer.training.step import ema_weights

CURVE_POINTS = 60


def scratch_folder() -> AbstractContextManager[Path]:
    """Return a temporary folder, which is removed at the end of its context."""
    return scratch(SCRATCH)


@dataclass(frozen=True)
class Trial:
    """A finished training, in a folder that is removed with the context."""

    job: Job
    curve: list[list[float]]  # step, and the training loss there
    valid: dict[str, float]  # the last evaluation
    diverged: bool

    @property
    def model(self) -> Transformer:
        return self.job.model.eval()

    @property
    def task(self) -> BuiltTask:
        return self.job.task

    def found(self) -> dict[str, Any]:
        """Return the measurements; a training that diverged has no metrics."""
        state, batch = self.job.state, self.job.loader.read(self.job.state.cursor)[0]
        return {
            "diverged": self.diverged,
            **({} if self.diverged else self.valid),
            "steps": state.step,
            "tokens": state.tokens,
            "flops": state.tokens * flops_per_token(self.job.model.config, batch),
            "parameters": self.job.model.num_parameters(),
            "curve": self.curve,
        }


@contextmanager
def trained(recipe: Recipe, begin: Callable[[Transformer], None] | None = None) -> Iterator[Trial]:
    """Train by a recipe in a temporary folder, which is removed at the end of the context.

    `begin` may change the model before the first step. No snapshots are written: nothing would read them.
    """
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"snapshots": 0})})
    with scratch_folder() as home:
        folder = home / "run"
        job = prepare(recipe, folder, resume=False, console=Console(quiet=True))
        if begin is not None:
            begin(job.model)
        diverged = False
        try:
            with Signals(_interrupt):  # at once: a checkpoint in this folder would be of no use
                fit(job)
        except Diverged:
            diverged = True
        rows = read_metrics(folder)
        curve = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), float)]
        last: dict[str, Any] = next((row for row in reversed(rows) if "valid_loss" in row), {})
        valid = {name.removeprefix("valid_"): value for name, value in last.items() if name != "step"}
        with ema_weights(job):
            yield Trial(job, _thinned(curve), valid, diverged)


def untrained(recipe: Recipe) -> Job:
    """Return the job of a recipe, without a folder, before its first step."""
    console = Console(quiet=True)
    splits = read_rows(recipe)
    task = make_task(recipe, splits["train"], console)
    train, valid = fit_rows(recipe, task, splits, console)
    return build(recipe, Path(), task, train, valid, console)


def _interrupt() -> None:
    raise KeyboardInterrupt


def trial(recipe: Recipe, begin: Callable[[Transformer], None] | None = None) -> dict[str, Any]:
    """Train by a recipe and return the measurements."""
    with trained(recipe, begin) as over:
        return over.found()


def _thinned(curve: list[tuple[int, float]]) -> list[list[float]]:
    """Return means over equal parts of a curve, each at the last of its steps."""
    size = max(1, -(-len(curve) // CURVE_POINTS))
    parts = [curve[at : at + size] for at in range(0, len(curve), size)]
    return [[part[-1][0], round(sum(loss for _, loss in part) / len(part), 6)] for part in parts]
