"""Damage run folders at random: each use of one ends with a clear error, a warning, or the same bits.

Finished and unfinished runs of several tasks are damaged in every way of `damage.py`, then loaded, evaluated or
resumed in a forked process with limits on time and memory. Without a new manifest the results must be the same, or
there is a `ConfigError` that names a file, or a warning. With a new manifest (resealed) the results may differ, but
there is neither a traceback nor a hang.
"""

import argparse
import hashlib
import io as streams
import itertools
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anyformer.config import ConfigError
from anyformer.recipe import Characters, Classify, Recipe
from anyformer.runs.run import Run, load
from anyformer.training.train import evaluate, train
from tests.torture.damage import KINDS
from tests.training.small import labelled, metrics, pairs, parities, run, stop_at, text

SECONDS, MEMORY = 60, 6 * 2**30
STATES, VERBS = ["finished", "unfinished"], ["load", "evaluate", "resume"]
TEXTS = {"seq2seq": ["1 2 3", "9 8"], "lm": ["the", "lazy"], "classify": ["1 2", "3"]}


def recipes(home: Path) -> dict[str, Recipe]:
    settings: dict[str, Any] = {"steps": 12, "save_every": 4, "keep": 3, "ema": 0.9, "evaluate_every": 6}
    both = pairs("encoder-decoder", **settings).model_copy(update={"source_tokenizer": Characters()})
    return {
        "seq2seq": both,
        "lm": text(home, **settings),
        "classify": labelled(home, Classify(), parities(), **settings),
    }


def digest(found: Run) -> str:
    weights = hashlib.sha256()
    for name, x in sorted(found.model.state_dict().items()):
        weights.update(name.encode())
        weights.update(x.contiguous().numpy().tobytes())
    return f"{weights.hexdigest()} {found.predict(TEXTS[found.spec.kind])}"


def use(verb: str, folder: Path, recipe: Recipe) -> str:
    """The result of a verb, as a text."""
    if verb == "load":
        return digest(load(folder))
    if verb == "evaluate":
        return str(evaluate(folder, split="valid"))
    made = train(recipe, folder, resume=True, console=Console(file=streams.StringIO()))
    last = [{k: v for k, v in row.items() if k != "step"} for row in _rows(folder)[-1:]]
    return f"{digest(made)} {last}"


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run; a finished run that is resumed does not write a missing file again."""
    return metrics(folder) if (folder / "metrics.jsonl").is_file() else []


def attempt(verb: str, folder: Path, recipe: Recipe) -> tuple[str, str]:
    """How a use ended, and its result or error."""
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            found = use(verb, folder, recipe)
        return ("warned" if told else "result"), found
    except ConfigError as error:
        what = str(error)
        named = str(folder.parent) in what or verb == "resume"
        return ("refused" if named and len(what) < 5000 else "unclear"), what
    except FloatingPointError as error:
        return "not finite", str(error)
    except BaseException:
        return "traceback", traceback.format_exc()


def forked(verb: str, folder: Path, recipe: Recipe) -> tuple[str, str]:
    """The same in a child process with limits."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(attempt(verb, folder, recipe)))
        os._exit(0)
    os.close(writing)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(SECONDS)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    if not found:
        return ("hang" if status == signal.SIGKILL else "crash"), f"status {status}"
    ended: tuple[str, str] = pickle.loads(found)
    return ended


def judge(kind: str, done: str, verb: str, ended: str, found: str, wanted: str) -> str:
    """The law that an end breaks, or nothing."""
    if ended in ("traceback", "hang", "crash", "unclear"):
        return ended
    if kind == "resealed" or ended in ("refused", "warned") or found == wanted:
        return ""
    if verb != "resume" and done.startswith("misplaced"):  # the newest checkpoint is gone without a trace
        return ""
    if verb == "resume" and "metrics.jsonl" in done:  # the weights are the same
        return "" if found.split()[0] == wanted.split()[0] else "other weights"
    return "other results without a word"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one folder, to look at its error")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.fsync = os.fstat  # type: ignore[assignment]  # nobody pulls the plug here
    console, ends, broken, began = Console(), Counter[str](), 0, time.perf_counter()
    columns = (TextColumn("folders"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch("anyformer.training.train.draw_curve", return_value=None),
        Progress(*columns, console=console) as bar,
    ):
        home, total = Path(name), bar.add_task("", total=asked.count)
        made = recipes(home)
        wanted = references(home, made)
        for number in range(asked.count) if asked.only is None else [asked.only]:
            chance = random.Random(f"{asked.seed} {number}")
            task, state, verb = (chance.choice(some) for some in (list(made), STATES, VERBS))
            kind = chance.choice(["unsealed", "resealed", *KINDS])
            folder = Path(shutil.copytree(home / f"{task}-{state}", home / "it" / "run"))
            done, same = KINDS[kind](folder, chance), wanted[task, state, verb]
            ended, found = forked(verb, folder, made[task])
            shutil.rmtree(home / "it")
            law = judge(kind, done, verb, ended, found, same)
            broken += bool(law)
            ends[f"{kind}: {ended if ended != 'result' else 'same' if found == same else 'other'}"] += 1
            if law or asked.only is not None:
                console.print(f"{number}: {law}: {task} {state} {verb}: {done}\n{found[-2500:]}", markup=False)
            bar.advance(total)
    for line, count in sorted(ends.items()):
        console.print(f"{count:6,}  {line}", highlight=False)
    seconds = time.perf_counter() - began
    console.print(f"{sum(ends.values()):,} damaged folders in {seconds:.0f} s: {broken} broken laws")
    if broken:
        sys.exit(1)


def references(home: Path, made: dict[str, Recipe]) -> dict[tuple[str, str, str], str]:
    """Train the runs that are damaged. Return the result of each use of them undamaged."""
    found: dict[tuple[str, str, str], str] = {}
    for task, recipe in made.items():
        run(recipe, home / f"{task}-finished")
        assert stop_at(recipe, home / f"{task}-unfinished", 10)
        for state, verb in itertools.product(STATES, VERBS):
            folder = Path(shutil.copytree(home / f"{task}-{state}", home / "it" / "run"))
            found[task, state, verb] = use(verb, folder, recipe)
            shutil.rmtree(home / "it")
    return found
