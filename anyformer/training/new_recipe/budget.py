"""The number of steps that fits into some minutes, from a dry run of a recipe."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from anyformer.recipe import MAX_CYCLES, Lengths, Recipe
from anyformer.recipe.ready import read_recipe
from anyformer.training.new_recipe.draft import RecipeDraft
from anyformer.training.new_recipe.models import DataFacts
from anyformer.training.plan import TrainingPlan, duration, plan

TRIAL_STEPS = 1000  # of the recipe that is measured
MIN_STEPS = 50
DEFAULT_MINUTES = 5.0
MIN_CYCLES = 3  # for fewer epochs one cycle is better
MIN_LEARNING_STEPS = {False: 1500, True: 200}  # from scratch, fine-tuning: after fewer, most models answer nonsense


def measure(made: RecipeDraft) -> tuple[RecipeDraft, TrainingPlan]:
    """Return the dry run of a drafted recipe; on a GPU its batches are first chosen by the lengths in tokens."""

    def fit(lengths: Lengths) -> Recipe:
        nonlocal made
        made = replace(made, facts=replace(made.facts, lengths=lengths))
        return _read(made.text(TRIAL_STEPS))

    measured = plan(_read(made.text(TRIAL_STEPS)), Console(stderr=True), fit if made.facts.gpu else None)
    return made, measured


def _read(text: str) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return read_recipe(str(path))


def steps_within(measured: TrainingPlan, minutes: float | None, facts: DataFacts) -> tuple[int, str]:
    """Return a number of steps, rounded down to two digits, and the reason for it, or for the given minutes.

    Without minutes they take 5, or longer if a model would not learn in that time, and are never more than the epochs
    of the task.
    """
    affordable = 60 * (minutes or DEFAULT_MINUTES) / measured.seconds
    if minutes is not None:
        steps = _rounded(max(1.0, affordable))
        return steps, f"about {steps:,} updates here"
    most, needed = _steps_of_epochs(measured, facts), MIN_LEARNING_STEPS[facts.first is not None]
    chosen = max(MIN_STEPS, min(most, max(affordable, needed)))
    if chosen == MIN_STEPS:
        reason = "no fewer make sense"
    elif most <= max(affordable, needed):
        reason = f"{facts.epochs} epochs"
    elif affordable >= needed:
        reason = f"at most {DEFAULT_MINUTES:g} minutes here"
    else:
        reason = "with fewer it would hardly learn"
    return _rounded(chosen), reason


def cycles_within(measured: TrainingPlan, steps: int, facts: DataFacts) -> int:
    """Return the cycles of the learning rate, of which the first takes about the epochs of the task.

    Where the time suffices for many more epochs, a model may be best long before the end, but only at a low rate.
    """
    cycles = math.floor(math.log2(steps / _steps_of_epochs(measured, facts) + 1))
    return 1 if cycles < MIN_CYCLES else min(cycles, MAX_CYCLES)


def _rounded(steps: float) -> int:
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return int(steps // unit * unit)


def _steps_of_epochs(measured: TrainingPlan, facts: DataFacts) -> float:
    return facts.epochs * measured.recipe.train.steps / measured.epochs


def minutes_note(measured: TrainingPlan, minutes: float | None, steps: int, facts: DataFacts) -> str | None:
    """Return a sentence if the minutes that a user gave are too few to learn."""
    needed = MIN_LEARNING_STEPS[facts.first is not None]
    if minutes is None or steps >= min(needed, 0.9 * _steps_of_epochs(measured, facts)):  # 0.9: steps are rounded down
        return None
    enough = f"{needed:,} need about {duration(needed * measured.seconds)}"
    return f"{steps:,} steps are too few to learn well; expect poor results; {enough}: --minutes sets the time"
