"""Steps that fit into a number of minutes, from a dry run of a recipe."""

import math
import tempfile
from pathlib import Path

from rich.console import Console

from anyformer.recipes import read_recipe
from anyformer.training.plan import Plan, plan

TRIAL_STEPS = 1000  # of the recipe that is measured
MIN_STEPS = 50
MIN_MINUTES = 0.01


def measure(text: str) -> Plan:
    """Return the dry run of a recipe."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return plan(read_recipe(str(path)), Console(stderr=True))


def steps_within(measured: Plan, minutes: float, epochs: int) -> int:
    """Return the steps of so many epochs, or of so many minutes if these are fewer; two digits of them."""
    per_epoch = measured.recipe.train.steps / measured.epochs
    steps = max(MIN_STEPS, min(epochs * per_epoch, 60 * minutes / measured.seconds))
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return int(steps // unit * unit)
