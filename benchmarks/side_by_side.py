"""Processes that prepare side by side and are timed one at a time: while one is, the others stand still.

To build and to compile models takes most of a table's time, and one core of each process.
"""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "ANYFORMER_TURNS"  # the variable that tells a process where the others are named
STILL = 0.5  # seconds until a GPU has done what a process had asked of it before it was stopped


def side_by_side(commands: Sequence[Sequence[str]]) -> bool:
    """Runs all of them; whether each came to its end. What they print is theirs."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "lock").touch()
        running = [
            subprocess.Popen([sys.executable, *command], env=os.environ | {FOLDER: folder}, start_new_session=True)
            for command in commands
        ]
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that none is left behind, or standing still
        try:
            codes = [process.wait() for process in running]
            return not any(codes)
        finally:
            signal.signal(signal.SIGTERM, before)
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def in_turns() -> bool:
    return FOLDER in os.environ


def join() -> None:
    """Names this process among those that take turns; each leads a group, with all that it starts."""
    if folder := os.environ.get(FOLDER):
        with locked():  # whoever is alone now does not know of this one
            (Path(folder) / str(os.getpid())).touch()


@contextmanager
def locked() -> Iterator[list[int]]:
    """None of the others is in here; gives those that there are."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        yield []
        return
    with open(Path(folder) / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield [int(path.name) for path in Path(folder).iterdir() if path.name not in ("lock", str(os.getpid()))]


@contextmanager
def alone() -> Iterator[None]:
    """The others stand still meanwhile."""
    with locked() as others:
        try:
            tell(others, signal.SIGSTOP)
            time.sleep(STILL if others else 0)
            yield
        finally:
            tell(others, signal.SIGCONT)


def tell(others: Sequence[int], what: signal.Signals) -> None:
    for pid in others:
        with suppress(ProcessLookupError):  # it has come to its end
            os.killpg(pid, what)
