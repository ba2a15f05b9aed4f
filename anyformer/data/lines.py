"""Files of any length, line by line, with a bar on a terminal and plain lines elsewhere. Imports no torch."""

import io
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.files import UNREADABLE, TooLarge, unpacked, why_unreadable

EVERY = 5.0  # seconds between plain lines
MAX_LINE = 2**28  # characters
CHUNK = 1000  # lines between looks at the clock


def read_lines(paths: Sequence[Path], encoding: str, console: Console) -> Iterator[str]:
    """The lines of text files with their ends, a .gz unpacked; progress goes to the console."""
    total, before, count = sum(map(_size, paths)), 0, 0
    began = shown = time.perf_counter()
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total or None)
        for path in paths:
            for line, done in _lines(path, encoding):
                count += 1
                if count % CHUNK == 0:
                    now = time.perf_counter()
                    bar.update(task, completed=before + done)
                    if not console.is_terminal and now - shown >= EVERY:
                        shown = now
                        _say(console, count, before + done, total, now - began)
                yield line
            before += _size(path)
    _print(console, f"read {count:,} lines in {time.perf_counter() - began:.1f} s")


def _say(console: Console, count: int, done: int, total: int, passed: float) -> None:
    left = max(0.0, passed * (total - done) / done) if done else 0.0
    rate = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {done / 1e6 / passed:.1f} MB/s, {left:.0f} s left"
    _print(console, f"read {count:,} lines, {rate}")


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _lines(path: Path, encoding: str) -> Iterator[tuple[str, int]]:
    """Each line, and how many bytes of the file are read. Lines end at "\\n" or "\\r\\n" only."""
    number = 0
    try:
        with path.open("rb") as raw:
            where = raw.tell if raw.seekable() else lambda: 0  # a pipe
            with io.TextIOWrapper(unpacked(raw, path), encoding=encoding, newline="\n") as text:
                for number, line in enumerate(iter(partial(text.readline, MAX_LINE), ""), 1):
                    if len(line) == MAX_LINE:
                        raise TooLarge(f"has a line of more than {MAX_LINE:,} characters, the {number}th")
                    line = line.removeprefix("\ufeff") if number == 1 else line
                    yield (f"{line[:-2]}\n" if line.endswith("\r\n") else line), where()
        return
    except LookupError:
        raise ConfigError(
            [Fault("encoding", f"= '{visible(encoding)}': unknown; such as utf-8, latin-1, cp949")]
        ) from None
    except UnicodeError:
        what = f"not {encoding}, somewhere after line {number}: set --encoding"
    except FileNotFoundError:
        what = "no such file"
    except UNREADABLE as error:
        what = why_unreadable(error)
    raise ConfigError([Fault(visible(str(path)), what)])


def _size(path: Path) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else 0
