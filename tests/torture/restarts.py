"""Kill and stop single ranks of a training under `torchrun --max-restarts`, at random moments.

A small recipe is trained by two processes, once undisturbed, and once with SIGKILL and SIGSTOP to random ranks: some
while they start, most of them in steps and saves. torchrun restarts the run from its last checkpoint each time. At the
end weights and metrics must be those of the undisturbed run, bit by bit, and no temporary file or lock is left.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anyformer.config import io
from anyformer.recipe import Recipe
from anyformer.runs.run import checkpoints
from tests.training.small import PACKED, assert_same_run, pairs

ROOT = Path(__file__).parents[2]
STEPS_BETWEEN = 40  # between two disturbances
LAST_STEPS = 200  # undisturbed: torchrun waits for ever for a rank that hangs after the run has ended
AT_START = 0.2  # fraction of the disturbances while the processes start
PATIENCE = 180.0  # seconds until the next checkpoint or restart
DESCRIPTIONS = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}


def recipe_for(disturbances: int, timeout: float) -> Recipe:
    spec = pairs(
        "encoder-decoder",
        PACKED,
        steps=STEPS_BETWEEN * disturbances + LAST_STEPS,
        save_every=10,
        evaluate_every=100,
        ema=0.9,
        log_every=10,
    )
    return io.override(spec, [f"parallel.timeout={timeout}"])


class Torchrun:
    """A training by two processes of one machine, with a log."""

    def __init__(self, recipe: Path, out: Path, restarts: int = 0, changes: Sequence[str] = ()):
        self.out, self.log = out, out.with_name(f"{out.name}.log")
        words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "-m", "anyformer", "train"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, str(recipe), *changes]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--resume", "auto", "--out", str(out)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def ranks(self) -> list[int]:
        """Process ids of both ranks, in their order; none while they are restarted."""
        found = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            try:
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if rank := next((one for one in env if one.startswith(b"RANK=")), None):
                found[rank] = int(pid)
        return [found[rank] for rank in sorted(found)] if len(found) == 2 else []

    def step(self) -> int:
        """The step of the newest checkpoint."""
        paths = checkpoints(self.out) if self.out.exists() else []
        return int(paths[-1].name.removeprefix("step-")) if paths else 0

    def fail(self, what: str) -> None:
        sys.exit(f"{what}; the end of {self.log.name}:\n{self.log.read_text()[-6000:]}")

    def wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not holds():
            if self.process.poll() is not None:
                self.fail(f"torchrun ended with code {self.process.returncode} before {what}")
            if time.monotonic() > until:
                self.fail(f"no {what} in {PATIENCE:.0f} s")
            time.sleep(0.005)

    def finish(self) -> None:
        if code := self.process.wait(timeout=PATIENCE):
            self.fail(f"torchrun ended with code {code}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.ranks() if self.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def disturb(run: Torchrun, signals: Sequence[signal.Signals], chance: random.Random) -> Iterator[str]:
    """Send each signal to a random rank at a random moment, and wait for the restart. Yield a line for each."""
    ranks = list[int]()

    def restarted() -> bool:
        return bool(now := run.ranks()) and not {*now} & {*ranks}

    run.wait_for("start of the processes", restarted)
    for number, kind in enumerate(signals, start=1):
        ranks = run.ranks()
        goal = STEPS_BETWEEN * number
        if chance.random() < AT_START:
            time.sleep(chance.uniform(0, 5))
        else:
            run.wait_for(f"checkpoint of step {goal}", lambda: run.step() >= goal)  # noqa: B023  called at once
            time.sleep(chance.uniform(0, 0.2))
        rank, step = chance.randrange(2), run.step()
        os.kill(ranks[rank], kind)
        yield f"rank {rank} {DESCRIPTIONS[kind]} after the checkpoint of step {step}"
        run.wait_for("restart", restarted)


def check(
    home: Path, kills: int, hangs: int, seed: int, changes: Sequence[str] = (), timeout: float = 20.0
) -> Iterator[str]:
    """Train undisturbed and disturbed, and compare. Yield each disturbance."""
    chance = random.Random(seed)
    signals = [signal.SIGKILL] * kills + [signal.SIGSTOP] * hangs
    chance.shuffle(signals)
    recipe = home / "recipe.toml"
    io.save(recipe_for(len(signals), timeout), recipe)
    with Torchrun(recipe, home / "undisturbed", changes=changes) as run:
        run.finish()
    with Torchrun(recipe, home / "disturbed", len(signals), changes) as run:
        yield from disturb(run, signals, chance)
        run.finish()
    assert_same_run(home / "undisturbed", home / "disturbed")
    assert not list((home / "disturbed").rglob(".*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--hangs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("changes", nargs="*", help="settings to change: parallel.shard=full")
    options = parser.parse_args()
    console = Console()
    columns = (TextColumn("restarts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as bar:
        total = bar.add_task("", total=options.kills + options.hangs)
        for what in check(Path(folder), options.kills, options.hangs, options.seed, options.changes):
            console.print(what)
            bar.advance(total)
    console.print(f"{options.kills} kills and {options.hangs} hangs of single ranks, the same bits at the end")
