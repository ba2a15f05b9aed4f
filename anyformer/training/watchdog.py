"""A time limit on every phase of a training: a process that hangs ends itself, so that torchrun can restart the run."""

import os
import sys
import threading
from pathlib import Path
from typing import Self

from anyformer.runs.processes import record_failure

PACKAGE = Path(__file__).parents[1]
TICKS = 20  # per limit


class Watchdog:
    """Context in which a thread ends this process once a phase takes longer than `limit` seconds; None: no limit.

    Time is counted in ticks of the thread, so that stopping the process (Ctrl-Z, `fg`) does not end it.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit, self._phase, self._ticks = limit, "start-up", 0
        self._done, self._watched = threading.Event(), threading.get_ident()

    def enter(self, phase: str) -> None:
        """Begin a phase, which the message of an expired limit names. It has the whole limit."""
        self._phase, self._ticks = phase, 0

    def __enter__(self) -> Self:
        if self._limit is not None:
            threading.Thread(target=self._watch, args=(self._limit,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self, limit: float) -> None:
        while not self._done.wait(limit / TICKS):
            self._ticks += 1
            if self._ticks >= TICKS:
                self._end(limit)

    def _end(self, limit: float) -> None:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        what = f"{rank}no progress for {limit:g} s (parallel.timeout) at {self._phase}, waiting {self._position()}"
        record_failure(what)
        print(f"{what}: ending this process", file=sys.stderr, flush=True)
        os._exit(1)

    def _position(self) -> str:
        """Return the function and line of this package in which the watched thread is."""
        frame = sys._current_frames().get(self._watched)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            frame = frame.f_back
        if frame is None:
            return "outside the package"
        return f"in {frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
