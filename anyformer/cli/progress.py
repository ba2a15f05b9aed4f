"""How far a long job is: a bar on a terminal, now and then a line elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 10.0  # between two lines


@contextmanager
def counting(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Tells of `total` things on stderr; the function that it gives is told how many more are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn(f"[bold]{what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, done, began = bar.add_task("", total=total), 0, time.perf_counter()
    shown = began

    def advance(more: int) -> None:
        nonlocal done, shown
        done, now = done + more, time.perf_counter()
        bar.update(task, completed=done)
        if not console.is_terminal and now - shown > SECONDS:
            shown = now
            left = (total - done) * (now - began) / done
            line = f"{done:,} of {total:,} {what}  {done / (now - began):.1f} a second  {left:.0f} s left"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    with bar:
        yield advance
