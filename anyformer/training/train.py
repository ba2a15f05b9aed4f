"""`train`: from a recipe to a finished run."""

import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from anyformer.config import ConfigError, Fault, io
from anyformer.data.readers import check_bad_rows, read
from anyformer.data.synthetic import Split
from anyformer.nn.model import Transformer
from anyformer.processes import locked
from anyformer.recipe import AnyTask, Classify, Recipe, Regress, Tag
from anyformer.recipes import DEFAULT, read_recipe
from anyformer.run import (
    MANIFEST,
    RECIPE,
    REQUIRED,
    Run,
    checkpoints,
    load,
    must_be_file,
    new_folder,
    read_tensors,
    seal,
    verify,
    weights_at,
    write_model,
    writing,
)
from anyformer.tasks.base import Metrics
from anyformer.tasks.build import build_task
from anyformer.training.checkpoint import checkpoint_path, planned, weights
from anyformer.training.ema import averaged
from anyformer.training.log import draw_curve, read_metrics
from anyformer.training.loop import Diverged, Interrupted, Job, fit
from anyformer.training.out_of_memory import TO_BUILD_WITH_LESS, enough, to_evaluate_with_less, to_train_with_less
from anyformer.training.parallel import Ranks, join
from anyformer.training.prepare import prepare
from anyformer.training.signals import Signals


def train(
    recipe: str | Recipe = DEFAULT,
    out: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    resume: bool = False,
    allow_changed_data: bool = False,
    console: Console | None = None,
) -> Run:
    """Train by a recipe (a built-in name, a file, or a `Recipe`) into a folder, `runs/<name>` if none is given.

    With `resume`, data files that changed since the last checkpoint are refused unless `allow_changed_data` is set.
    Under torchrun it is called by every process, and returns the run to each."""
    if allow_changed_data and not resume:
        raise ConfigError([Fault("--allow-changed-data", "is for --resume: a new run has no earlier data")])
    name, changes = recipe if isinstance(recipe, str) else "run", list(overrides)
    folder = Path(out) if out is not None else Path("runs") / Path(name).stem
    try:
        with join(agreed=(ConfigError, Interrupted, Diverged)) as ranks, Signals():
            spec = ranks.each(
                lambda: read_recipe(recipe, changes) if isinstance(recipe, str) else io.override(recipe, changes)
            )
            with _held(folder, ranks):
                with enough(lambda: TO_BUILD_WITH_LESS):
                    told = console or Console(quiet=not ranks.leads)
                    job = prepare(spec, folder, resume, told, ranks, allow_changed_data=allow_changed_data)
                with enough(partial(to_train_with_less, job)):
                    fit(job)
                    return finish(job)
    except KeyboardInterrupt:
        if saved := checkpoints(folder):
            raise Interrupted(f"interrupted; the last checkpoint is {saved[-1]}: continue with --resume") from None
        raise


@contextmanager
def _held(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Hold the run's folder: of several processes, the first does it for all."""
    with ExitStack() as stack:
        ranks.first(lambda: stack.enter_context(locked(folder)))
        yield


FIXED = ("model", "tokenizer", "source_tokenizer", "train", "parallel")  # what a run is; the rest may be changed


def evaluate(folder: str | Path, overrides: Iterable[str] = (), split: Split = "test") -> Metrics:
    """Measure a run on a split of its recipe's data, with `overrides` such as `task.beams=5`.

    The newest checkpoint of an unfinished run is measured; the note `unfinished` gives its step.
    """
    run = load(folder)
    kept = run.folder / RECIPE  # verified by its manifest, except in runs of earlier versions that are unfinished
    kept = kept if kept.exists() else must_be_file(Path(folder) / RECIPE)
    before = io.load(Recipe, kept)
    recipe = io.override(before, overrides)
    if fixed := [name for name in FIXED if getattr(recipe, name) != getattr(before, name)]:
        raise ConfigError([Fault(name, "is what the run was made with, and cannot be changed") for name in fixed])
    if recipe.task.kind != run.spec.kind:
        raise ConfigError([Fault("task.kind", f"= '{recipe.task.kind}': the run is of the task '{run.spec.kind}'")])
    spec: AnyTask = recipe.task
    if isinstance(run.spec, Classify | Regress | Tag):
        if recipe.task != before.task:
            raise ConfigError([Fault("task", "is what the run was made with, and cannot be changed")])
        spec = run.spec  # with what was learnt of the training rows
    task = build_task(spec, run.tokenizer, run.task.source_tokenizer)
    source = getattr(recipe.data, split)
    if source is None:
        there = [name for name in ("train", "valid", "test") if getattr(recipe.data, name) is not None]
        raise ConfigError([Fault(f"data.{split}", f"is not in {kept}; there are {', '.join(there)}")])
    rows = task.filter_rows(read(source, recipe.data, split, recipe.seed), run.config)
    rows = check_bad_rows(rows, recipe.data, split)
    with enough(partial(to_evaluate_with_less, recipe)):
        found = task.evaluate(run.model, rows, recipe.batches)
    if not math.isfinite(found.values.get("loss", 0.0)):
        raise FloatingPointError(f"the loss is {found.values['loss']}: the model's weights may hold NaN or Inf")
    if run.folder == Path(folder):
        return found
    step = int(run.folder.name.removeprefix("step-"))
    unfinished = f"training has not finished: this is its checkpoint at step {step:,} of {recipe.train.steps:,}"
    return replace(found, notes={**found.notes, "unfinished": unfinished})


def merge(folder: str | Path, out: str | Path) -> Run:
    """A run with an adapter as one without, that does the same, in another folder; its recipe comes along."""
    folder, out = Path(folder), Path(out)
    if out.exists():
        raise ConfigError([Fault(str(out), "is there already; choose another --out")])
    with new_folder(out) as temporary:
        run = load(folder, device="cpu")
        if run.config.adapter is None:
            raise ConfigError([Fault(str(folder), "has no adapter: there is nothing to merge")])
        made = run.merge()
        with writing(out):
            write_model(temporary, made.model.state_dict(), made.config, made.spec, made.task)
            if (kept := folder / RECIPE).is_file():
                shutil.copy(kept, temporary / RECIPE)
    return replace(made, folder=out)


def finish(job: Job) -> Run:
    """Writes the final weights, the curve and the card, and the manifest last."""
    with averaged(job):
        now = {name: x.clone() for name, x in weights(job.model).items()}
    job.ranks.first(lambda: _write(job, _final(job) or now))
    with torch.device("meta"):
        model = Transformer(job.model.config)
    model.load_state_dict(read_tensors(job.out / "model.safetensors"), assign=True)
    return Run(model.to(job.device).eval(), job.task, job.task.spec, job.out)


def _write(job: Job, kept: dict[str, Tensor]) -> None:
    names = [*REQUIRED, RECIPE]
    if job.task.source_tokenizer is not None:
        names.append("source_tokenizer.json")
    for name in ("model.safetensors", "README.md", "loss.png", MANIFEST):
        must_be_file(job.out / name)
    with writing(job.out):
        (job.out / MANIFEST).unlink(missing_ok=True)  # from here to the end the folder is not a finished run
        write_model(job.out, kept, job.model.config, job.task.spec, job.task)
        curve = draw_curve(job.out)
        (job.out / "README.md").write_text(_card(job, curve), encoding="utf-8")
        seal(job.out, names)


def _final(job: Job) -> dict[str, Tensor] | None:
    """The mean of the last checkpoints, or the best one where there was validation and a choice; None: as it stands."""
    spec = job.recipe.train
    if spec.average > 1:
        paths = planned(job.out, spec.save_every, job.state.step)[-spec.average :]
        sums: dict[str, Tensor] = {}
        for path in paths:
            for name, x in weights_at(path, verify(path)).items():
                sums[name] = sums[name] + x.double() if name in sums else x.double()
        return {name: (x / len(paths)).to(job.device, torch.float32) for name, x in sums.items()}
    best = checkpoint_path(job.out, job.state.best_step)
    if job.state.best is not None and best.exists() and job.state.best_step != job.state.step:
        return weights_at(best, verify(best))
    return None


def _card(job: Job, curve: Path | None) -> str:
    """A page about the run, for whoever finds the folder."""
    rows = read_metrics(job.out)
    last: dict[str, float] = next((row for row in reversed(rows) if "valid_loss" in row), {})
    found = "\n".join(f"- {name}: {value:.6g}" for name, value in last.items() if name != "step")
    picture = f"\n![loss]({curve.name})\n" if curve else ""
    return f"""# {job.out.name}

A {job.model.config.shape} of {job.model.num_parameters():,} parameters, trained for the task {job.recipe.task.kind}
over {job.state.step:,} steps and {job.state.tokens:,} tokens in {job.precision} on {job.device.type}
({job.state.bad_in_all} steps skipped). The whole recipe is in `{RECIPE}`.

{found}
{picture}
```python
import anyformer as af
run = af.load("{job.out.name}")
print(run.predict(["..."]))
```
"""
