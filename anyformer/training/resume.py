"""The folder of a run before training: the checkpoint to resume from, and changes of the data since then."""

import os
from pathlib import Path

from rich.console import Console

from anyformer.config import ConfigError, Fault, io
from anyformer.config.part import kind_of
from anyformer.config.spec import visible
from anyformer.data.fingerprint import Fingerprints, changes, fingerprint, of_file
from anyformer.recipe import Logger, Recipe
from anyformer.recipe.data import named_files
from anyformer.runs.processes import LOCK
from anyformer.runs.run import PLACES, RECIPE, SNAPSHOTS, checkpoints, leftovers, must_be_file, snapshots
from anyformer.training.checkpoint import read_fingerprints, step_of, verify_checkpoints

BEFORE_A_CHECKPOINT = (RECIPE, PLACES, "metrics.jsonl", "state", SNAPSHOTS)
CHANGEABLE = (
    "train.steps",
    "train.minutes",
    "data.root",
    "data.sets",
    "parallel.shard",
    "parallel.tensor",
    "parallel.context",
    "parallel.timeout",
    "train.loggers",
)  # settings that may differ when a run is resumed


def find_checkpoint(recipe: Recipe, out: Path, resume: bool) -> tuple[Path | None, dict[Path, ConfigError]]:
    """Return the checkpoint to resume from and the damaged ones; raise a `ConfigError` if `out` cannot be used.

    A run that ended before its first checkpoint holds nothing to resume: another one may take its folder.
    """
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError([Fault(visible(str(out)), "is not a folder: choose another --out")])
    if not out.exists() or not (files := {*out.iterdir()} - {*leftovers(out), out / LOCK}) or _is_untrained(out, files):
        return None, {}
    saved_recipe = must_be_file(out / RECIPE)
    if not saved_recipe.exists() and not checkpoints(out):
        raise ConfigError([Fault(visible(str(out)), "is not empty and holds no run: choose another --out")])
    if not resume:
        raise ConfigError([Fault(str(out), "holds a run: add --resume to continue it, or choose another --out")])
    before = io.load(Recipe, saved_recipe)
    if changes := [change for change in io.diff(before, recipe) if not change.path.startswith(CHANGEABLE)]:
        lines = [Fault(str(out), f"holds another run: {change}") for change in changes[:10]]
        raise ConfigError(lines)
    good, damaged = verify_checkpoints(out)
    return (good[-1] if good else None), damaged


def fingerprints(recipe: Recipe) -> Fingerprints:
    """Return the fingerprints of all data files, and of the run whose logits are part of the loss."""
    found = dict(fingerprint(recipe.data))
    for key, folder in frozen_run(recipe).items():
        if (weights := Path(folder) / "model.safetensors").is_file():  # an unfinished run has checkpoints only
            found[key] = of_file(weights)
    return found


def frozen_run(recipe: Recipe) -> dict[str, str]:
    """Return the run whose logits are part of the loss, by its key in the recipe; empty if there is none."""
    if recipe.task.compares_with_start and recipe.train.init_from is not None:
        return {"train.init_from": recipe.train.init_from}
    return {} if recipe.train.teacher is None else {"train.teacher.run": recipe.train.teacher.run}


def changed_data(recipe: Recipe, checkpoint: Path | None, allowed: bool, console: Console) -> list[str]:
    """Return the keys of the data files that changed since a checkpoint; raise a `ConfigError` unless allowed."""
    if checkpoint is None:
        return []
    before = read_fingerprints(checkpoint)
    if before is None:
        text = f"{checkpoint.name} has no fingerprints of its data: changes of the data since then are not detected"
        console.print(text, markup=False, soft_wrap=True)
        return []
    now = fingerprints(recipe)
    changed = changes(before, now)
    names, hint = dict(named_files(recipe.data)), "resume with the data of the run, or add --allow-changed-data"
    names |= frozen_run(recipe)
    faults = [
        Fault(key, f"= {names[key]!r}: changed since {checkpoint.name}, {_sizes(before.get(key), now[key])}")
        for key in changed
    ]
    if faults and not allowed:
        raise ConfigError(Fault(fault.path, f"{fault.message}; {hint}") for fault in faults)
    for fault in faults:
        console.print(str(fault), markup=False, soft_wrap=True)
    return changed


def _sizes(before: str | None, now: str) -> str:
    (old, _, _), (new, _, _) = ((value or "nothing").rpartition(" ") for value in (before, now))
    return f"{old} then, {new} now" if old != new else f"{new} as before, with other content"


def _is_untrained(out: Path, files: set[Path]) -> bool:
    """Return True if a folder holds only files that a training writes before its first checkpoint."""
    state, weights = out / "state", [path for path in snapshots(out) if step_of(path) > 0]
    empty = not weights and (not state.is_dir() or {*state.iterdir()} == {*leftovers(state)})
    loggers = {kind_of(part) for part in Logger.choices()}
    known = all(path.name in BEFORE_A_CHECKPOINT or path.stem in loggers for path in files)
    return empty and out / RECIPE in files and known
