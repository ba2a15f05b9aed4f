"""Seconds from the start of a process to its first training step: `python -m benchmarks.start [RECIPE]`."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anyformer.datasets.storage import download_folder

STEPS = ("train.steps=5", "train.log_every=1", "train.snapshots=0", "data.valid=none", "train.best=loss")
ROUNDS = 2  # processes that find stored code


class Start(NamedTuple):
    """Seconds to the loss of the first step: with an empty folder for compiled code, and with a filled one."""

    cold: float
    warm: list[float]


def start(recipe: str, overrides: Sequence[str] = ()) -> Start:
    """Measure a recipe in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        cold, *warm = (first_step(recipe, Path(folder), number, overrides) for number in range(1 + ROUNDS))
    return Start(cold, warm)


def first_step(recipe: str, home: Path, number: int, overrides: Sequence[str]) -> float:
    """Return the seconds to the first line about a step; the process runs to its end, which stores its code."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"ANYFORMER_DATA": str(download_folder()), "XDG_CACHE_HOME": str(home), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "anyformer", "train", recipe, "--out", str(home / f"run-{number}")]
    began, seconds, told = time.perf_counter(), None, list[str]()
    with subprocess.Popen(
        [*command, *STEPS, *overrides], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line)
            if seconds is None and line.startswith("step "):
                seconds = time.perf_counter() - began
    if process.returncode or seconds is None:
        raise RuntimeError(f"anyformer train {recipe} ended with {process.returncode}:\n{''.join(told)}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="shakespeare-gpu")
    parser.add_argument("overrides", nargs="*", help="changes of the recipe, such as batches.rows=2")
    args = parser.parse_args()
    found = start(args.recipe, args.overrides)
    warm = ", ".join(f"{seconds:.1f}" for seconds in found.warm)
    print(f"{args.recipe}: first step after {found.cold:.1f} s with an empty cache, after {warm} s with a filled one")


if __name__ == "__main__":
    main()
