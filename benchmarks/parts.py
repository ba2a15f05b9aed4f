"""Tokens per second in training with each part of `grids/parts.toml`: `python -m benchmarks.parts [OVERRIDE...]`.

Each setting has its own process: compiled and captured as in the training loop on a GPU, eager on a CPU. All are
prepared side by side and timed one at a time. The base is measured twice, and the difference of these two is noise.
"""

import sys
from dataclasses import replace
from pathlib import Path

from anyformer.lab.grid import load_grid
from anyformer.recipe import Crops
from anyformer.recipe.ready import read_recipe
from benchmarks.sheet import DEVICE, clock
from benchmarks.side_by_side import join, side_by_side
from benchmarks.training import ours, tokens

GRID = Path(__file__).parent / "grids" / "parts.toml"
VOCAB = 65  # characters of tiny Shakespeare
STEPS, ROUNDS = (50, 9) if DEVICE == "cuda" else (2, 5)  # timed as one, and how often
SETTING = "--setting"  # a number, by which this program calls itself


def measure(number: int, changes: list[str]) -> str:
    """Return a row of one setting: the median and the range of tokens per second."""
    (axis,) = load_grid(GRID).axes
    name = axis.values[number % len(axis.values)]
    recipe = read_recipe(load_grid(GRID).base, [*changes, *axis.changes(name), f"model.target.vocab={VOCAB}"])
    assert isinstance(recipe.batches, Crops)
    shape = recipe.batches.rows, recipe.batches.length
    way = ours(recipe.model, (tokens(VOCAB, *shape),), tokens(VOCAB, *shape))
    found, _ = clock(replace(way, each=STEPS), warm=2, rounds=ROUNDS)
    median, low, high = (shape[0] * shape[1] / seconds for seconds in (found.median, found.high, found.low))
    return f"{name:<20} {median:>12,.0f} {low:>12,.0f} {high:>12,.0f}"


def main(given: list[str]) -> None:
    """Print a row for each setting, in the order in which they are ready."""
    if given[:1] == [SETTING]:
        join()
        print(measure(int(given[1]), given[2:]), flush=True)
        return
    print(f"{'part':<20} {'tokens/s':>12} {'lowest':>12} {'highest':>12}", flush=True)
    (axis,) = load_grid(GRID).axes
    numbers = range(len(axis.values) + 1)  # the last is the base again
    complete = side_by_side([["-m", "benchmarks.parts", SETTING, str(number), *given] for number in numbers])
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
