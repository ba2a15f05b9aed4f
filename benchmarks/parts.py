"""Tokens per second in training with each part of `grids/parts.toml`: `python -m benchmarks.parts [OVERRIDE...]`.

One process measures one setting after the other: compiled and captured as in the training loop on a GPU, eager on a
CPU. A rate is the best of some rounds; the base is measured first and last, and the difference of these two is noise.
"""

import sys
import time
from pathlib import Path

import torch

from anyformer.lab.grid import load_grid
from anyformer.recipe import Crops
from anyformer.recipes import read_recipe
from benchmarks.sheet import DEVICE
from benchmarks.training import ours, tokens

GRID = Path(__file__).parent / "grids" / "parts.toml"
VOCAB = 65  # characters of tiny Shakespeare
ROUNDS = 5


def rate(changes: list[str]) -> float:
    """Return the tokens per second of training steps of the grid's recipe with some changes."""
    recipe = read_recipe(load_grid(GRID).base, [*changes, f"model.target.vocab={VOCAB}"])
    assert isinstance(recipe.batches, Crops)
    shape = recipe.batches.rows, recipe.batches.length
    inputs, labels = tokens(VOCAB, *shape), tokens(VOCAB, *shape)
    step, best = ours(recipe.model, (inputs,), labels).make(), 0.0
    for _ in range(3):
        step()
    count = 100 if DEVICE == "cuda" else 2
    for _ in range(ROUNDS):
        _wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        _wait()
        best = max(best, count * inputs.numel() / (time.perf_counter() - start))
    return best


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main(changes: list[str]) -> None:
    """Print a row for each setting."""
    (axis,) = load_grid(GRID).axes
    rates = [(value, rate([*changes, *axis.changes(value)])) for value in (*axis.values, axis.values[0])]
    base = rates[0][1]
    print(f"{'part':<20} {'tokens/s':>12} {'to base':>8}")
    for name, found in rates:
        print(f"{name:<20} {found:>12,.0f} {found / base:>8.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
