"""Progress of long jobs: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def counting(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of `total` items on stderr. Yield a function that is called with the number just finished."""
    done, began = 0, time.perf_counter()
    shown = began
    show: Callable[[int], bool] | None = None

    def advance(more: int) -> None:
        nonlocal done, shown, show
        done, now = done + more, time.perf_counter()
        if show is None and done < total:  # a job of one part needs no bar, nor the time to import it
            show = stack.enter_context(_bar(total, what))
        if show is not None and not show(done) and done and now - shown > SECONDS_BETWEEN_LINES:
            shown = now
            left = (total - done) * (now - began) / done
            line = f"{done:,} of {total:,} {what}  {done / (now - began):.1f} a second  {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    with ExitStack() as stack:
        yield advance


class LineCounter:
    """Counts lines, and shows on stderr how many a second, and the time left if the `size` of the input is known."""

    def __init__(self, size: int | None):
        self._size, self._lines, self._read, self._skipped = size, 0, 0, 0
        self._began = self._shown = time.perf_counter()
        self._terminal = sys.stderr.isatty()

    def skip(self, size: int) -> None:
        """Count bytes that an earlier run has processed."""
        self._skipped += size

    def __call__(self, lines: int, size: int) -> None:
        """Count lines, and bytes of the input, that have been processed."""
        self._lines, self._read, now = self._lines + lines, self._read + size, time.perf_counter()
        if now - self._shown < (1.0 if self._terminal else SECONDS_BETWEEN_LINES):
            return
        self._shown = now
        line = f"{self._lines:,} lines  {self._lines / (now - self._began):.1f} lines/s"
        if self._size and self._read:
            done = self._skipped + self._read
            seconds = max(0, self._size - done) * (now - self._began) / self._read
            line += f"  {100 * done / self._size:.0f} %  {seconds:.0f} s left"
        self._print(line)

    def _print(self, line: str) -> None:
        start, end = ("\r\x1b[K", "") if self._terminal else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line of a terminal."""
        if self._terminal and self._shown > self._began:
            self._print("")


@contextmanager
def counting_lines(size: int | None) -> Iterator[LineCounter]:
    """Show the progress of lines on stderr. `size` is that of the input in bytes, if it is known."""
    counter = LineCounter(size)
    try:
        yield counter
    finally:
        counter.close()


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[int], bool]]:
    """Show a bar. Yield a function that sets the number of finished items, and returns whether the bar is visible."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn(f"[bold]{what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=total)

    def move(done: int) -> bool:
        bar.update(task, completed=done)
        return console.is_terminal

    with bar:
        yield move


@contextmanager
def counting_bytes(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of bytes on stderr, with their rate.

    Yield a function of the finished and the total bytes; 0 finished bytes start the clock.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn(f"[bold]{what}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, began, shown = bar.add_task("", total=None), 0.0, 0.0

    def update(done: int, total: int) -> None:
        nonlocal began, shown
        now = time.perf_counter()
        bar.update(task, completed=done, total=total)
        if not done:
            began = shown = now
        elif not console.is_terminal and now - shown > SECONDS_BETWEEN_LINES:
            shown = now
            rate = done / (now - began)
            line = f"{what} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB  {rate / 1e6:.1f} MB/s"
            line += f"  {(total - done) / rate:.0f} s left"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    with bar:
        yield update
