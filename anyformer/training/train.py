"""`train`, `evaluate` and `merge`: from a recipe to a finished run and its evaluation."""

import math
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from anyformer.attention.attend import without_plans
from anyformer.config import ConfigError, Fault, io
from anyformer.config.outside import record, record_of
from anyformer.data.readers import Rows, check_bad_rows, read
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.rounding import Bits
from anyformer.recipe import NamedSplit, Recipe, Task, splits
from anyformer.recipe.ready import DEFAULT, read_recipe
from anyformer.runs.processes import check_shared, locked, read_lock, restart_count
from anyformer.runs.run import (
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
    unfinished,
    verify,
    weights_at,
    write_model,
    write_run,
    writing,
)
from anyformer.tasks.base import BuiltTask, Metrics, media_of, readable
from anyformer.training.checkpoint import checkpoint_path, gather_weights, regular_checkpoints
from anyformer.training.job import Job
from anyformer.training.log import draw_curve, read_metrics
from anyformer.training.loop import Diverged, Interrupted, fit
from anyformer.training.out_of_memory import BUILD_ADVICE, advise_out_of_memory, evaluate_advice, train_advice
from anyformer.training.parallel import Ranks, attempt, join
from anyformer.training.prepare import prepare
from anyformer.training.signals import Signals, Watchdog
from anyformer.training.step import ema_weights


def train(
    recipe: str | Recipe = DEFAULT,
    out: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    resume: bool = False,
    allow_changed_data: bool = False,
    console: Console | None = None,
    began: float | None = None,
) -> Run:
    """Train a model by a recipe, write its run folder, and return the run.

    Under torchrun every process calls it, and each gets the run.

    Args:
        recipe: the name of a built-in recipe, a file, or a `Recipe`.
        out: the run folder; None: `runs/<name>`.
        overrides: changes of the recipe, such as `train.steps=200`.
        resume: continue the training in that folder.
        allow_changed_data: with `resume`, accept data files that changed since the last checkpoint.
        console: where progress is shown; None: standard output.
        began: when the time of `train.minutes` began, by `time.monotonic`; None: now.

    Returns:
        The run with the weights that are evaluated: the best, the averaged or the last, as the recipe says.

    Raises:
        ConfigError: the recipe, the data or the folder are wrong; all faults at once, before the first step.
        Diverged: losses were not finite too often.
        Interrupted: a signal ended the training; its last step is saved.

    Example:
        >>> changes = ["train.steps=2", "data.train.count=64", "data.valid.count=8", "data.test.count=8"]
        >>> run = af.train("sort", out="runs/two-steps", overrides=changes)  # doctest: +ELLIPSIS
        step 2/2  loss ...
        >>> run.folder.name
        'two-steps'
    """
    if allow_changed_data and not resume:
        raise ConfigError([Fault("--allow-changed-data", "needs --resume: a new run has no earlier data")])
    began = time.monotonic() if began is None else began
    name, changes = recipe if isinstance(recipe, str) else "run", list(overrides)
    folder = Path(out) if out is not None else Path("runs") / Path(name).stem
    try:
        found, fault = attempt(
            lambda: read_recipe(recipe, changes) if isinstance(recipe, str) else io.override(recipe, changes)
        )
        with (
            Watchdog(found.parallel.timeout if found else None) as watchdog,
            join(agreed=(ConfigError, Interrupted, Diverged)) as ranks,
            Signals(),
        ):
            spec = ranks.on_each(lambda: _or_raise(found, fault))
            ranks = ranks.arranged(spec.parallel)
            watchdog.enter("the preparation of data and model")
            with _locked(folder, ranks):
                with advise_out_of_memory(lambda: BUILD_ADVICE):
                    output = console or Console(quiet=not ranks.is_first)
                    job = prepare(spec, folder, resume, output, ranks, allow_changed_data=allow_changed_data)
                    job.watchdog = watchdog
                with advise_out_of_memory(partial(train_advice, job)):
                    fit(job, began)
                    watchdog.enter("the end: the run folder is written")
                    return finish(job)
    except KeyboardInterrupt:
        if saved := checkpoints(folder):
            raise Interrupted(f"interrupted; the last checkpoint is {saved[-1]}: continue with --resume") from None
        raise


def _or_raise(recipe: Recipe | None, fault: ConfigError | None) -> Recipe:
    if fault is not None:
        raise fault
    assert recipe is not None
    return recipe


@contextmanager
def _locked(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Lock the run's folder; the first process does it for all, which must see its lock.

    A restart waits for the processes that it replaces.
    """
    with ExitStack() as stack:

        def lock() -> bytes:
            stack.enter_context(locked(folder, wait=restart_count() > 0))
            return read_lock(folder)

        content = ranks.on_first(lock)
        ranks.on_each(lambda: check_shared(folder, content))
        yield


MAX_VALUES = 1000  # of a column by which metrics are reported
FIXED = ("model", "tokenizer", "source_tokenizer", "train", "parallel")  # settings that an evaluation may not change


def evaluate(
    folder: str | Path,
    overrides: Iterable[str] = (),
    split: str = "test",
    by: str | None = None,
    bits: Bits | None = None,
) -> Metrics:
    """Evaluate a run on a split of its recipe's data.

    The newest checkpoint of an unfinished run is evaluated; the note `unfinished` gives its step.

    Args:
        folder: a run folder.
        overrides: changes of the recipe, such as `task.beams=5`.
        split: "train", "valid", "test", or the name of a test set; "test" is all of them, as `name.loss`.
        by: a column of the file; the note `by` has the metrics for the rows of each value.
        bits: 8 or 4 for quantised weights; None: the weights as they are.

    Returns:
        The metrics: the `count` of rows or tokens, `values` by their names, and `notes`.

    Raises:
        ConfigError: the run has no recipe or no such split, or an override changes what training has fixed.

    Example:
        >>> metrics = af.evaluate("runs/sort", ["data.test.count=20"])
        >>> metrics.count, metrics.values["exact_match"]
        (20, 1.0)
    """
    run = load(folder)
    run = run if bits is None else run.quantise(bits)
    tasks = "--tasks FILE evaluates it on rows of a file, " if run.spec.kind == "lm" else ""
    path = recipe_path(run, folder, f"{tasks}train.init_from={folder} trains it on data of a recipe")
    before = io.load(Recipe, path)
    recipe = io.override(before, overrides)
    if fixed := [name for name in FIXED if getattr(recipe, name) != getattr(before, name)]:
        raise ConfigError([Fault(name, "was fixed in training and cannot be changed") for name in fixed])
    if recipe.task.kind != run.spec.kind:
        raise ConfigError(
            [Fault("task.kind", f"= '{recipe.task.kind}': the run was trained for the task '{run.spec.kind}'")]
        )
    spec = recipe.task
    if isinstance(run.spec, Task) and run.spec.is_completed:
        if recipe.task != before.task:
            raise ConfigError([Fault("task", "was fixed in training and cannot be changed")])
        spec = run.spec  # with the labels or the range of the training rows
    task = spec.build(run.tokenizer, run.task.source_tokenizer)
    found: dict[str, Metrics] = {}
    for one in split_sources(recipe, split, path):
        rows = read(one.source, recipe.data, one.split, recipe.seed, one.key, by)
        rows = task.filter_rows(readable(rows, media_of(task)), run.config)
        rows = check_bad_rows(rows, recipe.data, one.key)
        with advise_out_of_memory(partial(evaluate_advice, recipe)), without_plans():
            metrics = found[one.name] = _measure(task, run, rows, recipe, by)
        if not math.isfinite(metrics.values.get("loss", 0.0)):
            raise FloatingPointError(f"the loss is {metrics.values['loss']}: the model's weights may hold NaN or Inf")
    if split not in found:
        values = {f"{name}.{key}": value for name, each in found.items() for key, value in each.values.items()}
        count, notes = sum(each.count for each in found.values()), {name: each.notes for name, each in found.items()}
        metrics = Metrics(metrics.task, count, values, {name: some for name, some in notes.items() if some})
    if note := unfinished(run, folder):
        return replace(metrics, notes={**metrics.notes, "unfinished": note})
    return metrics


def recipe_path(run: Run, folder: str | Path, instead: str) -> Path:
    """Return the recipe of a run: verified by its manifest, except in unfinished runs of earlier versions.

    Without one, the `ConfigError` ends with what to do instead.
    """
    path = run.folder / RECIPE
    if not path.exists() and not (path := Path(folder) / RECIPE).exists():
        raise ConfigError([Fault(str(folder), f"has no {RECIPE}: it was not trained here, and has no data; {instead}")])
    return must_be_file(path)


def split_sources(recipe: Recipe, split: str, path: Path) -> list[NamedSplit]:
    """Return the sources of a split, which may be the name of a test set; "test" is all of them."""
    known = splits(recipe.data)
    if chosen := [one for one in known if split in (one.name, one.split)]:
        return chosen
    names = dict.fromkeys([*(one.name for one in known), *(one.split for one in known)])
    raise ConfigError([Fault(f"data.{split}", f"is not in {path}; --split can be {', '.join(names)}")])


def _measure(task: BuiltTask, run: Run, rows: Rows, recipe: Recipe, by: str | None) -> Metrics:
    """Evaluate a run on some rows, and on those of each value of the column "by", if the rows have it."""
    if by is None:
        return task.evaluate(run.model, rows, recipe.batches)
    numbers: dict[str, list[int]] = {}
    for i, value in enumerate(rows.columns["by"]):
        numbers.setdefault(value, []).append(i)
    if len(numbers) > MAX_VALUES:
        what = f"has {len(numbers):,} values: metrics are reported for at most {MAX_VALUES}"
        raise ConfigError([Fault("by", f"= {by!r}: {what}")])
    metrics = task.evaluate(run.model, rows, recipe.batches)
    each = {value: task.evaluate(run.model, rows.take(numbers[value]), recipe.batches) for value in sorted(numbers)}
    tables = {value: {"n": one.count, **one.values} for value, one in each.items()}
    return replace(metrics, notes={**metrics.notes, "by": {by: tables}})


def merge(folder: str | Path, out: str | Path) -> Run:
    """Merge a run's LoRA adapter into its weights, and write the new run, with the recipe, to another folder."""
    folder, out = Path(folder), Path(out)
    if out.exists():
        raise ConfigError([Fault(str(out), "exists already; choose another --out")])
    with new_folder(out) as temporary:
        run = load(folder, device="cpu")
        if run.config.adapter is None:
            raise ConfigError([Fault(str(folder), "has no adapter: there is nothing to merge")])
        merged = run.merge()
        with writing(out):
            write_run(temporary, merged)
            if (recipe := folder / RECIPE).is_file():
                shutil.copy(recipe, temporary / RECIPE)
    return replace(merged, folder=out)


def finish(job: Job) -> Run:
    """Write the final weights, the loss curve, the README, and the manifest last; return the run."""
    with ema_weights(job):
        last = {name: x.clone() for name, x in gather_weights(job.model).items()}
    job.ranks.on_first(lambda: _write(job, _chosen_weights(job) or last))
    with torch.device("meta"):
        model = Transformer(job.model.config)
    model.load_state_dict(read_tensors(job.out / "model.safetensors"), assign=True)
    return Run(model.to(job.device).eval(), job.task, job.task.spec, job.out)


def _write(job: Job, weights: dict[str, Tensor]) -> None:
    names = [*REQUIRED, RECIPE]
    if job.task.source_tokenizer is not None:
        names.append("source_tokenizer.json")
    for name in ("model.safetensors", "README.md", "loss.png", MANIFEST):
        must_be_file(job.out / name)
    with writing(job.out):
        (job.out / MANIFEST).unlink(missing_ok=True)  # until it is written again the run is unfinished
        write_model(job.out, weights, job.model.config, job.task.spec, job.task)
        record(job.recipe, record_of(job.out / RECIPE))
        curve = draw_curve(job.out)
        (job.out / "README.md").write_text(_card(job, curve), encoding="utf-8")
        seal(job.out, names)


def _chosen_weights(job: Job) -> dict[str, Tensor] | None:
    """Return the mean of the last checkpoints, or the weights of the best one; None: those of the last step."""
    spec = job.recipe.train
    if spec.average > 1:
        paths = regular_checkpoints(job.out, spec.save_every, job.state.step)[-spec.average :]
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
    """Return the README.md of the run."""
    rows = read_metrics(job.out)
    last: dict[str, float] = next((row for row in reversed(rows) if "valid_loss" in row), {})
    metrics = "\n".join(f"- {name}: {value:.6g}" for name, value in last.items() if name != "step")
    picture = f"\n![loss]({curve.name})\n" if curve else ""
    return f"""# {job.out.name}

A {job.model.config.shape} of {job.model.num_parameters():,} parameters, trained for the task {job.recipe.task.kind}
over {job.state.step:,} steps and {job.state.tokens:,} tokens in {job.precision} on {job.device.type}
({job.state.bad_in_all} steps skipped). The whole recipe is in `{RECIPE}`.

{metrics}
{picture}
```python
import anyformer as af
run = af.load("{job.out.name}")
print(run.predict(["..."]))
```
"""
