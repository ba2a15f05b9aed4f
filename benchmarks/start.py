"""Seconds from the start of a process to its first training step: `python -m benchmarks.start [RECIPE]`."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from anyformer.data.datasets.storage import download_folder

STEPS = ("train.steps=5", "train.log_every=1", "train.snapshots=0", "data.valid=none", "train.best=loss")
ROUNDS = 2  # processes that find stored code
FILES = (".anyformer-lock", "recipe.toml", "metrics.jsonl")  # of a run, each written at the end of a stage
INTERVAL = 0.01  # seconds between two looks for the next file


class Stages(NamedTuple):
    """Seconds from the start of a process to the end of each stage."""

    imports: float
    build: float  # data, model and optimiser
    first_step: float  # its loss is read

    def __str__(self) -> str:
        return f"{self.first_step:.1f} s (imports {self.imports:.1f}, data and model {self.build:.1f})"


class Start(NamedTuple):
    """A start with an empty folder for compiled code, and some with a filled one."""

    cold: Stages
    warm: list[Stages]


def start(recipe: str, overrides: Sequence[str] = ()) -> Start:
    """Measure a recipe in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        cold, *warm = (first_step(recipe, Path(folder), number, overrides) for number in range(1 + ROUNDS))
    return Start(cold, warm)


def first_step(recipe: str, home: Path, number: int, overrides: Sequence[str]) -> Stages:
    """Return the seconds to each file of a run; the process runs to its end, which stores its code."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"ANYFORMER_DATA": str(download_folder()), "XDG_CACHE_HOME": str(home)}
    out, printed = home / f"run-{number}", home / f"printed-{number}"
    command = [sys.executable, "-m", "anyformer", "train", recipe, "--out", str(out), *STEPS, *overrides]
    began, seconds = time.perf_counter(), list[float]()
    with (
        printed.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None:
            if len(seconds) < len(FILES) and (out / FILES[len(seconds)]).exists():
                seconds.append(time.perf_counter() - began)
            time.sleep(INTERVAL)
    if process.returncode or len(seconds) < len(FILES):
        raise RuntimeError(f"anyformer train {recipe} ended with {process.returncode}:\n{printed.read_text()}")
    return Stages(*seconds)


def has_bytecode(package: str) -> bool:
    """Return whether the compiled source of a package is stored. Without it, each process compiles it again."""
    spec = find_spec(package)
    return spec is not None and spec.cached is not None and Path(spec.cached).exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="shakespeare-gpu")
    parser.add_argument("overrides", nargs="*", help="changes of the recipe, such as batches.rows=2")
    args = parser.parse_args()
    before = ", ".join(f"{package}: {'yes' if has_bytecode(package) else 'no'}" for package in ("torch", "anyformer"))
    print(f"bytecode is stored: {before}", flush=True)
    found = start(args.recipe, args.overrides)
    print(f"{args.recipe}: seconds from the start of the process to its first step")
    print(f"  with an empty cache: {found.cold}")
    for one in found.warm:
        print(f"  with a filled cache: {one}")


if __name__ == "__main__":
    main()
