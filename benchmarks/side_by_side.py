"""Run benchmark processes in parallel, but time one at a time: the others are stopped meanwhile.

Building and compiling models takes most of the time of a table, and one core of each process.
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

FOLDER = "ANYFORMER_TURNS"  # environment variable: folder that lists the processes
STILL = 0.5  # seconds until a GPU has finished the work of a process that was stopped


def side_by_side(commands: Sequence[Sequence[str]]) -> bool:
    """Run all commands in parallel; return whether each succeeded. They print to the same output."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "lock").touch()
        running = [
            subprocess.Popen([sys.executable, *command], env=os.environ | {FOLDER: folder}, start_new_session=True)
            for command in commands
        ]
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left running or stopped
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
    """Register this process; each leads a process group with its children."""
    if folder := os.environ.get(FOLDER):
        with locked():  # the process that is being timed does not know this one yet
            (Path(folder) / str(os.getpid())).touch()


@contextmanager
def locked() -> Iterator[list[int]]:
    """Hold the lock of all processes; yield the ids of the others."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        yield []
        return
    with open(Path(folder) / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield [int(path.name) for path in Path(folder).iterdir() if path.name not in ("lock", str(os.getpid()))]


@contextmanager
def alone() -> Iterator[None]:
    """Stop all other processes within this context."""
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
