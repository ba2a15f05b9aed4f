"""Steps that fit into a number of minutes, from a dry run of a recipe."""

import math
import tempfile
from pathlib import Path

from rich.console import Console

from anyformer.new.models import Facts
from anyformer.recipes import read_recipe
from anyformer.training.plan import Plan, duration, plan

TRIAL_STEPS = 1000  # of the recipe that is measured
MIN_STEPS = 50
DEFAULT_MINUTES = 5.0
MIN_LEARNING_STEPS = {False: 1500, True: 200}  # from scratch, fine-tuning: after fewer, most models answer nonsense


def measure(text: str) -> Plan:
    """Return the dry run of a recipe."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return plan(read_recipe(str(path)), Console(stderr=True))


def steps_within(measured: Plan, minutes: float | None, facts: Facts) -> tuple[int, str]:
    """Return a number of steps, rounded down to two digits, and the reason.

    They take the given minutes; without these, 5 minutes, or longer if a model would not learn in that time. They are
    never more than the epochs of the task.
    """
    most = _steps_of_epochs(measured, facts)
    affordable = 60 * (minutes or DEFAULT_MINUTES) / measured.seconds
    needed = MIN_STEPS if minutes else MIN_LEARNING_STEPS[facts.first is not None]
    steps = max(MIN_STEPS, min(most, max(affordable, needed)))
    if steps == MIN_STEPS:
        reason = "no fewer make sense"
    elif most <= max(affordable, needed):
        reason = f"{facts.epochs} epochs"
    elif affordable >= needed:
        reason = f"at most {minutes or DEFAULT_MINUTES:g} minutes here"
    else:
        reason = "with fewer it would hardly learn"
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return int(steps // unit * unit), reason


def _steps_of_epochs(measured: Plan, facts: Facts) -> float:
    return facts.epochs * measured.recipe.train.steps / measured.epochs


def minutes_note(measured: Plan, minutes: float | None, steps: int, facts: Facts) -> str | None:
    """Return a sentence if the minutes that a user gave are too few to learn, or fewer than any training takes."""
    if minutes is None:
        return None
    if steps <= MIN_STEPS and steps * measured.seconds > 60 * minutes:
        what = f"{steps} steps, the fewest that make sense, take {duration(steps * measured.seconds)}"
        return f"--minutes {minutes:g} cannot be kept: {what}; smaller batches.tokens or model.width are faster"
    needed = MIN_LEARNING_STEPS[facts.first is not None]
    if steps >= min(needed, 0.9 * _steps_of_epochs(measured, facts)):  # 0.9: steps are rounded down
        return None
    enough = f"{needed:,} need about {duration(needed * measured.seconds)}"
    return f"{steps:,} steps are too few to learn well; expect poor results; {enough}: --minutes sets the time"
