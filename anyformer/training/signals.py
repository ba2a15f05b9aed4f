"""Being asked to stop."""

import signal
import threading
from typing import Any


class Signals:
    """SIGINT and SIGTERM ask for a stop at the next step; a second one stops at once."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # signals come to the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._take)
        return self

    def _take(self, number: int, frame: object) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
