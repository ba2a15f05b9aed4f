"""Coordinate check of width transfer: sizes of activations by width after some steps (Yang et al. 2022).

Every model is trained on one batch at the peak learning rate. Where the size of an activation grows with the width, so
does the effect of a learning rate, and the best rate of a narrow model is too large for a wide one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyformer.config import ConfigError, Fault
from anyformer.lab.figures import legend, lines, log_ticks, panels
from anyformer.lab.stats import power
from anyformer.lab.trial import untrained
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.recipe import MuP, Packed, Recipe
from anyformer.recipe.ready import read_recipe
from anyformer.tasks.base import inputs_of
from anyformer.training.step import TrainingStep, set_learning_rate

KEY = "model.width"
NAMES = ["*.out"]  # of sublayers, and the residual stream after each layer
STEPS = 4


@dataclass(frozen=True)
class Coordinate:
    """The mean absolute value of an activation."""

    scale: str  # standard or mup
    width: int
    step: int  # before the first one: 0
    name: str
    size: float


def check_coordinates(recipe: str, changes: Sequence[str], steps: int = STEPS) -> list[Coordinate]:
    """Measure a recipe without and with muP, for the widths of a change such as `model.width=64,128,256`.

    The base width is that of `train.scale` if the changes give it, else the smallest of the widths.
    """
    given = [change.partition("=")[2] for change in changes if change.partition("=")[0] == KEY]
    rest = [change for change in changes if change.partition("=")[0] != KEY]
    widths = [int(word) for words in given for word in words.split(",") if word.strip().isdecimal()]
    if len({*widths}) < 2:
        raise ConfigError([Fault(KEY, "name at least two widths to compare: model.width=64,128,256")])
    widths = sorted({*widths})
    fixed = ["train.compile=off", "train.precision=fp32", "data.test=none"]
    own = read_recipe(recipe, [*rest, f"{KEY}={widths[0]}"]).train.scale
    base = own.base_width if isinstance(own, MuP) else widths[0]
    scales = {"standard": "train.scale=standard", "mup": f"train.scale={{kind='mup', base_width={base}}}"}
    return [
        found
        for scale, change in scales.items()
        for width in widths
        for found in measure(read_recipe(recipe, [*rest, *fixed, change, f"{KEY}={width}"]), scale, steps)
    ]


def measure(recipe: Recipe, scale: str, steps: int) -> list[Coordinate]:
    """Train on one batch for some steps, and return the sizes of activations before and after each."""
    job = untrained(recipe)
    take_step, (batch, _) = TrainingStep(job), job.loader.read(job.state.cursor)
    inputs = inputs_of(batch.to(job.device), isinstance(recipe.batches, Packed))
    found: list[Coordinate] = []
    for step in range(steps + 1):
        if step:
            set_learning_rate(job, recipe.train.optimizer.lr)
            take_step([batch]).scalars.read()
        with torch.no_grad():
            logits, seen = run_with_taps(job.model.eval(), NAMES, *inputs)
            seen = dict(seen) | {"logits": logits}
        found += [Coordinate(scale, recipe.model.width, step, name, float(x.abs().mean())) for name, x in seen.items()]
    return found


def table(found: Sequence[Coordinate]) -> list[tuple[str, ...]]:
    """Return sizes after the last step by activation and width, and their growth: size ∝ width^exponent."""
    widths, last = sorted({one.width for one in found}), max(one.step for one in found)
    rows: list[tuple[str, ...]] = [("scale", "activation", *(f"width {width}" for width in widths), "exponent")]
    for scale, name in dict.fromkeys((one.scale, one.name) for one in found):
        sizes = _sizes(found, scale, name, last)
        growth = power(widths, [sizes[width] for width in widths]).exponent
        rows.append((scale, name, *(f"{sizes[width]:.3g}" for width in widths), f"{growth:+.2f}"))
    return rows


def draw(found: Sequence[Coordinate]) -> Any:
    """Return a figure of the sizes of the logits and of the last layer by width, one line for each step."""
    widths, steps = sorted({one.width for one in found}), sorted({one.step for one in found})
    names = list(dict.fromkeys(one.name for one in found))
    shown = [names[-2], names[-1]]  # an activation of the last layer, and the logits
    figure, axes = panels(4)
    for axis, (name, scale) in zip(axes, [(n, s) for n in shown for s in ("standard", "mup")], strict=True):
        named = {
            f"step {step}": {width: [size] for width, size in _sizes(found, scale, name, step).items()}
            for step in steps
        }
        lines(axis, named)
        log_ticks(axis, widths)
        axis.set_yscale("log")
        title = f"{name}, {'with' if scale == 'mup' else 'without'} muP"
        axis.set(title=title, xlabel="width", ylabel="mean absolute value")
    legend(figure, axes[0], columns=5)
    return figure


def _sizes(found: Sequence[Coordinate], scale: str, name: str, step: int) -> dict[float, float]:
    return {float(one.width): one.size for one in found if (one.scale, one.name, one.step) == (scale, name, step)}
