"""Timed measurements run alone: no other measurement of this machine runs beside them.

Every measurement holds a shared lock on a file. A timed one takes the lock exclusively while it times: it waits until
the others have ended, and new ones wait at a gate until it is done.
"""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_held: list[IO[str]] = []  # the open lock of the measurement of this process


@contextmanager
def beside_others() -> Iterator[None]:
    """Hold the shared lock during one measurement; nested calls change nothing."""
    if _held:
        yield
        return
    with _open("gate") as gate, _open("lock") as lock:
        fcntl.flock(gate, fcntl.LOCK_SH)  # waits while a timed measurement waits or runs
        fcntl.flock(lock, fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        _held.append(lock)
        try:
            yield
        finally:
            _held.clear()


@contextmanager
def alone() -> Iterator[None]:
    """Run the block while no other measurement of this machine runs."""
    with beside_others(), _open("gate") as gate:
        (lock,) = _held
        fcntl.flock(lock, fcntl.LOCK_UN)  # before the gate: another timed measurement may hold that, and wait for this
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(gate, fcntl.LOCK_UN)
            fcntl.flock(lock, fcntl.LOCK_SH)


def _open(name: str) -> IO[str]:
    return (Path(tempfile.gettempdir()) / f"anyformer-lab.{name}").open("w")
