"""Kill training over and over, at random moments and within saves.

Small recipes of six kinds of task, or built-in recipes by name, are trained once undisturbed, and once more with
SIGKILL again and again. After each kill every checkpoint must be complete. At the end weights and metrics must be those
of the undisturbed run, bit by bit, and no temporary file or lock is left.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anyformer.config import ConfigError, io
from anyformer.data.readers import read
from anyformer.recipe import (
    Additions,
    Classify,
    CopyDigits,
    Crops,
    Embed,
    JoinedSources,
    MaskedLanguageModel,
    MixedSources,
    Recipe,
    ReverseDigits,
    Scenes,
    SortDigits,
    WrittenDates,
)
from anyformer.recipe.ready import read_recipe
from anyformer.runs.run import checkpoints, verify
from tests.forking import forking
from tests.training.small import (
    CROPS,
    PACKED,
    assert_same_run,
    child,
    corrupted,
    labelled,
    pairs,
    parities,
    run,
    spellings,
    tagging,
    text,
)

STEPS, SAVES = 40, 4  # steps of a run, and steps between its saves
SYNCS = 120  # about how often such a run syncs something to disk


def kinds(home: Path) -> dict[str, Recipe]:
    """Recipes of six kinds of task."""
    (home / "embed").mkdir(parents=True)
    given: dict[str, Any] = {"steps": STEPS, "save_every": SAVES, "evaluate_every": 10, "ema": 0.9, "accumulate": 2}
    return {
        "seq2seq": pairs("encoder-decoder", PACKED, **given),
        "lm": text(home, CROPS, **given),
        "mlm": corrupted(home, MaskedLanguageModel(), **given),
        "classify": labelled(home, Classify(), parities(), **given),
        "tag": tagging(home, **given),
        "embed": labelled(home / "embed", Embed(), spellings(), **given),
    }


def small(name: str) -> Recipe:
    """A built-in recipe made short, with few rows; everything else is left as it is."""
    recipe = read_recipe(name, [f"train.steps={STEPS}", f"train.save_every={SAVES}", "train.evaluate_every=none"])
    size = ["batches.rows=4", "batches.length=32"] if isinstance(recipe.batches, Crops) else ["batches.tokens=512"]
    return io.override(recipe, [*size, _few(recipe), "data.valid=none", "data.test=none", "train.compile=off"])


def _few(recipe: Recipe) -> str:
    match recipe.data.train:
        case SortDigits() | CopyDigits() | ReverseDigits() | WrittenDates() | Additions() | Scenes():
            return "data.train.count=600"
        case JoinedSources():
            return "data.train.parts.*.stop=0.05"
        case MixedSources():
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
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("recipes", nargs="*", help="built-in recipes; if none is named, the six kinds of task")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chance, console = random.Random(asked.seed), Console()
    recipes = {name: recipe for name in asked.recipes if there(recipe := small(name))}
    if missing := sorted({*asked.recipes} - {*recipes}):
        console.print(f"without their data: {', '.join(missing)} (set ANYFORMER_DATA)")
    context = forking()
    columns = (TextColumn("kills"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as bar:
        total = bar.add_task("", total=asked.kills)
        recipes = recipes or kinds(Path(folder) / "data")
        for number, (name, recipe) in enumerate(recipes.items()):
            reference, struck = Path(folder) / name, Path(folder) / f"{name}-struck"
            began = time.perf_counter()
            run(recipe, reference)
            lasts = time.perf_counter() - began
            kills = rounds = 0
            wanted = asked.kills * (number + 1) // len(recipes) - asked.kills * number // len(recipes)
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
            assert not list(struck.rglob(".*"))
            console.print(
                f"{name}: {kills} kills over {rounds + 1} runs, all checkpoints complete, the same bits at the end"
            )
