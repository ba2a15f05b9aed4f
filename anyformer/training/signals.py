"""Requests to stop: SIGINT and SIGTERM."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

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
