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


@contextmanager
def counting_lines(size: int | None, done: int = 0) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of lines on stderr: lines done, lines per second, and the time left if the `size` is known.

    Yield a function that is called with the number of lines, and of input bytes, just finished. Of the `size` in
    bytes, `done` were finished before.
    """
    lines = read = 0
    began = shown = time.perf_counter()
    terminal = sys.stderr.isatty()

    def advance(more: int, more_bytes: int) -> None:
        nonlocal lines, read, shown
        lines, read, now = lines + more, read + more_bytes, time.perf_counter()
        if now - shown < (1.0 if terminal else SECONDS_BETWEEN_LINES):
            return
        shown = now
        line = f"{lines:,} lines  {lines / (now - began):.1f} lines/s"
        if size and read:
            left = (size - done - read) * (now - began) / read
            line += f"  {100 * (done + read) / size:.0f} %  {max(left, 0):.0f} s left"
        print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if terminal and shown > began:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


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
