"""A thread that writes while training continues, one piece of work at a time."""

import threading
from collections.abc import Callable
from typing import Self


class BackgroundWriter:
    """Context in which a thread runs one piece of work at a time. Its errors are raised by `check` and `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        """True after work that ended with an error, until the error is raised."""
        return self._error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Run a function in the thread, after the previous one has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the last work, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until the work has ended, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised by the training thread
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:  # another error is being raised: only complete the checkpoint
            self._thread.join()
