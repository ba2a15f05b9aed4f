"""Requests to stop: SIGINT and SIGTERM."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

GRACE = 1.0  # seconds in which further signals are part of the same request: terminals and supervisors send several


class Signals:
    """Note SIGINT and SIGTERM as `came`, so that the work stops at its next safe moment.

    A signal after `GRACE` seconds raises `KeyboardInterrupt`. A signal that this process ignores stays ignored. Inside
    another such context, what that one has noted counts here as well.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None) -> None:
        """`notice` is called when the first signal comes."""
        self.came = False
        self._notice, self._at = notice, 0.0
        self._before: dict[int, Any] = {}
        self._outer: Signals | None = None

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # signals come to the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if before is signal.SIG_IGN:
                continue
            if isinstance(outer := getattr(before, "__self__", None), Signals):
                self._outer = outer
            self._before[number] = before
            signal.signal(number, self._take)
        if self._outer is not None:
            self.came, self._at, self._notice = self._outer.came, self._outer._at, self._outer._notice
        return self

    def _take(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self.came:
            if now - self._at > GRACE:
                raise KeyboardInterrupt
            return
        self.came, self._at = True, now
        self._notice()

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            self._outer.came, self._outer._at = self.came, self._at
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._take:  # not replaced since
                signal.signal(number, handler)
