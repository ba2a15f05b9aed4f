"""Predictions that are killed again and again: the output is that of an undisturbed process, byte for byte.

    python -m tests.torture predictions [LINES]

One process is killed three times. A Ray cluster of two workers is killed twice.
"""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.explore import made

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", *map(str, range(10)))
PATIENCE = 600.0  # seconds for some progress


def main() -> None:
    lines = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with TemporaryDirectory() as name:
        print(run(Path(name), lines, local_kills=3, ray_kills=2))


def run(folder: Path, lines: int, local_kills: int, ray_kills: int) -> str:
    """Compare outputs of killed predictions with that of an undisturbed one; return a line about them."""
    model, given, whole = made.written("pair", folder), folder / "in.txt", folder / "whole.txt"
    rng = random.Random(0)
    given.write_text("".join(" ".join(rng.choices(WORDS, k=rng.randint(0, 9))) + "\n" for _ in range(lines)))
    began = time.monotonic()
    _predict(model, given, whole).wait()
    alone = time.monotonic() - began
    report = [f"{lines:,} lines: one process {lines / alone:,.0f} lines/s"]
    if local_kills:
        out = folder / "out.txt"
        record = out.with_name("out.txt.part.json")
        _kill(
            lambda: _predict(model, given, out), lambda: record.stat().st_mtime if record.exists() else 0, local_kills
        )
        assert out.read_bytes() == whole.read_bytes(), "the output of a killed process differs"
        report.append(f"killed {local_kills} times: equal")
    if ray_kills:
        out, options = folder / "out", ("--engine", "ray", "--jobs", "2")
        parts = out / "in.txt.parts"
        began = time.monotonic()
        _kill(lambda: _predict(model, given, out, *options), lambda: len(list(parts.glob("[0-9]*"))), ray_kills)
        assert (out / "in.txt").read_bytes() == whole.read_bytes(), "the output of a killed cluster differs"
        report.append(f"Ray, 2 workers, killed {ray_kills} times: equal, {time.monotonic() - began:.0f} s in all")
        shutil.rmtree(out)
    return "; ".join(report)


def _predict(model: Path, given: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "anyformer", "predict", model, given, "--out", out, *options]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def _kill(start: Callable[[], subprocess.Popen[bytes]], progress: Callable[[], float], times: int) -> None:
    """Kill a program several times after it has made some progress, and let it finish at last."""
    for _ in range(times):
        before, program, until = progress(), start(), time.monotonic() + PATIENCE
        while progress() <= before:
            assert program.poll() is None, "it finished before it could be killed"
            assert time.monotonic() < until
            time.sleep(0.005)
        program.send_signal(signal.SIGKILL)
        program.wait()
    assert start().wait() == 0
