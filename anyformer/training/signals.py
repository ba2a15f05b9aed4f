"""What ends a training early: SIGINT and SIGTERM, and a time limit on every phase.

A process that hangs ends itself, so that torchrun can restart the run.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from anyformer.runs.processes import record_failure

GRACE = 1.0  # seconds in which further signals are part of the same request: terminals and supervisors send several


class Signals:
    """Context that notes SIGINT and SIGTERM as `received`, so that the work stops at its next safe moment.

    A further signal after `GRACE` seconds raises `KeyboardInterrupt`. A signal that this process ignores stays
    ignored. A nested context starts with what the outer one has received.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None) -> None:
        """`notice` is called at the first signal."""
        self.received = False
        self._notice, self._at = notice, 0.0
        self._before: dict[int, Any] = {}
        self._outer: Signals | None = None

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread receives signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if before is signal.SIG_IGN:
                continue
            if isinstance(outer := getattr(before, "__self__", None), Signals):
                self._outer = outer
            self._before[number] = before
            signal.signal(number, self._receive)
        if self._outer is not None:
            self.received, self._at, self._notice = self._outer.received, self._outer._at, self._outer._notice
        return self

    def _receive(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.received:
            if now - self._at > GRACE:
                raise KeyboardInterrupt
            return
        self.received, self._at = True, now
        self._notice()

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            self._outer.received, self._outer._at = self.received, self._at
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._receive:  # not replaced since
                signal.signal(number, handler)


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
