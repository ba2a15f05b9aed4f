"""Kills training over and over, at random moments and within saves.

Every recipe whose data is at hand is trained once undisturbed, and once more while SIGKILL strikes again and again.
After each kill every committed checkpoint must be whole; at the end weights and metrics must be the undisturbed run's,
bit by bit.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anyformer.config import ConfigError, io
from anyformer.data.sources import read
from anyformer.recipe import (
    Additions,
    CopyDigits,
    Crops,
    Joined,
    Mixed,
    Recipe,
    ReverseDigits,
    SortDigits,
    WrittenDates,
)
from anyformer.recipes import names, read_recipe
from anyformer.run import checkpoints, verify
from tests.forking import forking
from tests.training.small import assert_same_run, child, run

STEPS, SAVES = 40, 4  # steps of a run, and steps between its saves
SYNCS = 120  # about how often such a run syncs something to disk


def small(name: str) -> Recipe:
    """A recipe made short, with few rows; everything else is left as it is."""
    recipe = read_recipe(name, [f"train.steps={STEPS}", f"train.save_every={SAVES}", "train.evaluate_every=none"])
    size = ["batches.rows=4", "batches.length=32"] if isinstance(recipe.batches, Crops) else ["batches.tokens=512"]
    return io.override(recipe, [*size, _few(recipe), "data.valid=none", "data.test=none", "train.compile=off"])


def _few(recipe: Recipe) -> str:
    match recipe.data.train:
        case SortDigits() | CopyDigits() | ReverseDigits() | WrittenDates() | Additions():
            return "data.train.count=600"
        case Joined():
            return "data.train.parts.*.stop=0.05"
        case Mixed():
            return "data.train.parts.*.rows.stop=0.05"
        case _:
            return "data.train.stop=0.05"


def there(recipe: Recipe) -> bool:
    try:
        read(recipe.data.train, recipe.data, "train", recipe.seed)
    except ConfigError:
        return False
    return recipe.train.init_from is None or Path(recipe.train.init_from).exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("recipes", nargs="*", help="if none is named, all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chance, console = random.Random(asked.seed), Console()
    wished = asked.recipes or names()
    recipes = {name: recipe for name in wished if there(recipe := small(name))}
    if missing := sorted({*wished} - {*recipes}):
        console.print(f"without their data: {', '.join(missing)} (set ANYFORMER_DATA)")
    context = forking()
    columns = (TextColumn("kills"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as bar:
        total = bar.add_task("", total=asked.kills)
        for number, (name, recipe) in enumerate(recipes.items()):
            reference, struck = Path(folder) / name, Path(folder) / f"{name}-struck"
            began = time.perf_counter()
            run(recipe, reference)
            lasts = time.perf_counter() - began
            kills, rounds, wanted = (
                0,
                0,
                asked.kills * (number + 1) // len(recipes) - asked.kills * number // len(recipes),
            )
            while kills < wanted:
                in_save = chance.random() < 0.5
                moment = (chance.randint(1, SYNCS), None) if in_save else (None, chance.uniform(0, 1.2 * lasts))
                process = context.Process(target=child, args=(io.dumps(recipe), struck, *moment))
                process.start()
                process.join()
                for path in checkpoints(struck):
                    verify(path)  # refuses by name what is not whole
                if process.exitcode == 0:  # it came to its end before: compare, and begin another
                    assert_same_run(reference, struck)
                    rounds, struck = rounds + 1, Path(folder) / f"{name}-struck-{rounds + 1}"
                elif process.exitcode == -signal.SIGKILL:
                    kills += 1
                    bar.advance(total)
                else:
                    sys.exit(f"{name}: a resumed run ended with code {process.exitcode}")
            run(recipe, struck, resume=True)
            assert_same_run(reference, struck)
            console.print(
                f"{name}: {kills} kills over {rounds + 1} runs, every checkpoint whole, the same bits at the end"
            )
