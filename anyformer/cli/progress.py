"""How far a long job is: a bar on a terminal, now and then a line elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

SECONDS = 10.0  # between two lines


@contextmanager
def counting(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Tells of `total` things on stderr; the function that it gives is told how many more are done."""
    done, began = 0, time.perf_counter()
    shown = began
    show: Callable[[int], bool] | None = None

    def advance(more: int) -> None:
        nonlocal done, shown, show
        done, now = done + more, time.perf_counter()
        if show is None and done < total:  # what is done at once needs no bar, nor the time to import one
            show = shows.enter_context(_bar(total, what))
        if show is not None and not show(done) and now - shown > SECONDS:
            shown = now
            left = (total - done) * (now - began) / done
            line = f"{done:,} of {total:,} {what}  {done / (now - began):.1f} a second  {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    with ExitStack() as shows:
        yield advance


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[int], bool]]:
    """A bar; the function that it gives moves it, and says whether it can be seen."""
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
def passing(what: str) -> Iterator[Callable[[int, int], None]]:
    """Tells of bytes on stderr, with their rate; the function that it gives is told how many are done, of how many:
    none of them when the work begins."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn(f"[bold]{what}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, began, shown = bar.add_task("", total=None), 0.0, 0.0

    def tell(done: int, total: int) -> None:
        nonlocal began, shown
        now = time.perf_counter()
        bar.update(task, completed=done, total=total)
        if not done:
            began = shown = now
        elif not console.is_terminal and now - shown > SECONDS:
            shown = now
            rate = done / (now - began)
            line = f"{what} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB  {rate / 1e6:.1f} MB/s"
            line += f"  {(total - done) / rate:.0f} s left"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    with bar:
        yield tell
