"""Lines of a file or stream of any length, in windows. Imports no torch."""

import hashlib
import io
import select
from collections.abc import Callable
from typing import IO

from anyformer.config.spec import ConfigError, Fault, visible

CHUNK = 2**20  # bytes that are read at once
PATIENCE = 0.05  # seconds without further bytes of a pipe after which its lines so far are a window


class LineReader:
    """Reads UTF-8 lines in windows. Counts and hashes the bytes of the windows, so that a later run can skip them.

    Lines end at "\\n", "\\r\\n" or "\\r". The lines of a pipe or terminal that pauses are returned at once.
    """

    def __init__(self, file: IO[bytes], name: str):
        self._file, self._name = file, name
        self._ready: list[bytes] = []  # complete lines that are in no window yet
        self._rest, self._ended = b"", False
        self._digest, self._part = hashlib.sha256(), hashlib.sha256()
        self.lines = self.bytes = 0  # of all windows so far

    @property
    def sha256(self) -> str:
        """The hash of all windows so far."""
        return self._digest.hexdigest()

    def start_part(self) -> Callable[[], str]:
        """Begin a part of the input; return a function that returns the hash of the windows since."""
        part = self._part = hashlib.sha256()
        return part.hexdigest

    def skip(self, size: int, lines: int) -> None:
        """Pass over the windows of an earlier run, of `size` bytes and `lines` lines."""
        left = size
        while left and (chunk := self._file.read(min(left, CHUNK))):
            self._digest.update(chunk)
            left -= len(chunk)
        self.bytes, self.lines = size - left, lines

    def read(self, count: int) -> list[str]:
        """Return the next `count` lines, or some more if "\\r" ends lines; fewer at the end, and then none."""
        lines: list[str] = []
        while len(lines) < count and (raw := self._next(bool(lines))) is not None:
            lines += self._decode(raw)
            self._digest.update(raw)
            self._part.update(raw)
            self.bytes += len(raw)
        self.lines += len(lines)
        return lines

    def _next(self, may_stop: bool) -> bytes | None:
        """Return a line with its end; None at the end, or with `may_stop` where no line is there yet."""
        while not self._ready and not self._ended:
            if may_stop and not self._has_bytes():
                return None
            chunk = _read_some(self._file)
            self._ended = not chunk
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._ready = [line + b"\n" for line in reversed(lines)]
            if self._ended and self._rest:
                self._ready = [self._rest]
        return self._ready.pop() if self._ready else None

    def _has_bytes(self) -> bool:
        try:
            return bool(select.select([self._file], [], [], PATIENCE)[0])
        except (OSError, ValueError):  # it is not a file of the system
            return True

    def _decode(self, raw: bytes) -> list[str]:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            what = f"is not UTF-8 at byte {self.bytes + error.start}: convert it to UTF-8"
            raise ConfigError([Fault(visible(self._name), what)]) from None
        return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def _read_some(file: IO[bytes]) -> bytes:
    """Return bytes that are there, or wait for some; none at the end."""
    return file.read1(CHUNK) if isinstance(file, io.BufferedReader) else file.read(CHUNK)
