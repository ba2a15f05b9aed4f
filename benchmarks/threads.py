"""Training steps of recipes with one thread and with all: `python -m benchmarks.threads [RECIPE...]`.

Steps of both sides alternate in one process, first as the machine is, then beside one more busy process.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the program sets it, before torch is loaded
import torch
from rich.console import Console

from anyformer.kernels.hardware import usable_cores
from anyformer.recipe.ready import read_recipe
from anyformer.training.checkpoint import START
from anyformer.training.machine import threads
from anyformer.training.prepare import prepare
from anyformer.training.step import TrainingStep, set_learning_rate
from benchmarks.sheet import RESULTS, Sheet

RECIPES = ("sort", "shakespeare")
ROUNDS, STEPS = 5, 12


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def rates(recipe: str) -> dict[int, list[float]]:
    """Return the steps per second of each round, by the number of threads."""
    with tempfile.TemporaryDirectory() as folder:
        job = prepare(read_recipe(recipe, []), Path(folder) / "run", False, Console(quiet=True))
        take_step, (batch, _) = TrainingStep(job), job.loader.read(START)
        set_learning_rate(job, 1e-4)
        found: dict[int, list[float]] = {1: [], usable_cores(): []}
        for count in range(ROUNDS + 1):
            for number, times in found.items():
                with threads(number):
                    began = time.perf_counter()
                    for _ in range(STEPS):
                        take_step([batch])[1].read()
                    if count:  # the first round is for warming up
                        times.append(STEPS / (time.perf_counter() - began))
        return found


def measure(sheet: Sheet, recipe: str, condition: str) -> None:
    one, several = rates(recipe).values()
    name = "ours, all threads"
    spread = {"ours": [min(one), max(one)], name: [min(several), max(several)]}
    medians = statistics.median(one), statistics.median(several)
    load = os.getloadavg()[0]
    key = f"threads_{recipe}_{condition}"
    sheet.put(key, *medians, "steps/s", peer_name=name, spread=spread, load=load)


def rows(sheet: Sheet, recipes: tuple[str, ...] = RECIPES) -> None:
    for recipe in recipes:
        measure(sheet, recipe, "quiet")
        with busy_process():
            measure(sheet, recipe, "busy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json", help="the file for the numbers")
    args = parser.parse_args()
    torch.set_num_threads(usable_cores())
    rows(Sheet(args.out), tuple(args.recipes))


if __name__ == "__main__":
    main()
