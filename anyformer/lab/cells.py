"""Many small measurements, side by side, each kept as soon as it is done.

A cell is what is varied, in plain JSON; a measurement is a function of it alone. Results go line by line into a file;
cells that are there are not measured again, so work that was stopped goes on where it was.
"""

import json
import multiprocessing
import os
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from anyformer import __version__
from anyformer.config import ConfigError, Fault
from anyformer.hardware import usable_cores
from anyformer.processes import end_with_parent, remove_abandoned
from anyformer.run import writing

SCRATCH = "anyformer-lab-"  # how the names of temporary folders begin

Cell = Mapping[str, Any]
Measure = Callable[[Cell], dict[str, Any]]


@dataclass(frozen=True)
class Result:
    """What was found of a cell."""

    cell: dict[str, Any]
    found: dict[str, Any]
    seconds: float
    machine: str

    def __getitem__(self, name: str) -> Any:
        return self.found[name] if name in self.found else self.cell[name]


def measure_all(
    measure: Measure, cells: Sequence[Cell], path: Path, *, jobs: int = 1, console: Console | None = None
) -> list[Result]:
    """The results of all cells, in their order; those that the file has are taken from it.

    `measure` is a function of a module, or something else that a process can be given. The processor's cores are shared
    out among the jobs.
    """
    console = console or Console(quiet=True)
    done = {key(result.cell): result for result in read_results(path)}
    left = [cell for cell in cells if key(cell) not in done]
    with _board(console, len(cells), len(cells) - len(left)) as tell:
        for result in _measured(measure, left, jobs, tell):
            append(path, result)
            done[key(result.cell)] = result
    return [done[key(cell)] for cell in cells]


def key(cell: Cell) -> str:
    """By which a cell is known."""
    return json.dumps(cell, sort_keys=True, ensure_ascii=False)


Tell = Callable[[Result | None, Sequence[Cell]], None]


def _measured(measure: Measure, cells: Sequence[Cell], jobs: int, tell: Tell) -> Iterator[Result]:
    """As they come."""
    threads = max(1, usable_cores() // jobs)
    if jobs == 1 or len(cells) < 2:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for cell in cells:
                tell(None, [cell])
                result = _timed(measure, cell)
                tell(result, [])
                yield result
        finally:
            torch.set_num_threads(before)
        return
    context, given = multiprocessing.get_context("spawn"), (threads, os.getpid())
    with (
        _terminable(),
        ProcessPoolExecutor(min(jobs, len(cells)), context, initializer=_begin, initargs=given) as pool,
    ):
        waiting, running = list(cells), dict[Future[Result], Cell]()
        try:
            while waiting or running:
                while waiting and len(running) < jobs:  # not all at once, so that a stop need not wait for them
                    cell = waiting.pop(0)
                    running[pool.submit(_timed, measure, cell)] = cell
                tell(None, list(running.values()))
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    result = future.result()
                    tell(result, list(running.values()))
                    yield result
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
                process.join()
            remove_abandoned(Path(tempfile.gettempdir()), f"{SCRATCH}*")  # theirs
            raise


@contextmanager
def _terminable() -> Iterator[None]:
    """Being told to end is as Ctrl-C: the processes that were started would else go on without us."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread only
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin(threads: int, parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(threads)


def _timed(measure: Measure, cell: Cell) -> Result:
    began = time.perf_counter()
    found = measure(cell)
    return Result(dict(cell), found, round(time.perf_counter() - began, 2), machine())


def machine() -> str:
    """Where and with what a number was measured."""
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        where = f"{platform.machine()} CPU, {torch.get_num_threads()} of {usable_cores()} cores"
    return f"{where}, torch {torch.__version__.partition('+')[0]}, anyformer {__version__}"


# -- the file ---------------------------------------------------------------------------------------------------------


def read_results(path: Path) -> list[Result]:
    """Of a file, or none where there is none. A last line that was cut short is passed over."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.append(Result(**json.loads(line)))
        except (ValueError, TypeError):
            raise ConfigError([Fault(f"{path}:{number}", "is no result: mend or delete this line")]) from None
    return found


def append(path: Path, result: Result) -> None:
    """One line more, on the disk before it counts as done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(result.__dict__, ensure_ascii=False) + "\n"
    with writing(path), path.open("a+b") as file:
        _cut_half_line(file)
        file.write(line.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


def _cut_half_line(file: Any) -> None:
    file.seek(0)
    text = file.read()
    file.truncate(text.rfind(b"\n") + 1)


# -- the board --------------------------------------------------------------------------------------------------------


@contextmanager
def _board(console: Console, total: int, done: int) -> Iterator[Tell]:
    """A bar with what is running on a terminal; else a line for each cell that is done."""
    bar = Progress(
        TextColumn("[bold]lab"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )
    task, count = bar.add_task("", total=total, completed=done, note=""), done

    def tell(result: Result | None, running: Sequence[Cell]) -> None:
        nonlocal count
        if result is not None:
            count += 1
            bar.advance(task)
            console.print(
                f"{count}/{total}  {in_words(result.cell)}  {shown(result.found)}  {result.seconds:.0f} s",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        bar.update(task, note="; ".join(map(in_words, running)))

    with bar:
        yield tell


def in_words(cell: Cell) -> str:
    return " ".join(f"{name}={value}" for name, value in cell.items())


def shown(found: Mapping[str, Any]) -> str:
    """The plain numbers of a result."""
    plain = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return "  ".join(f"{name} {value:.4g}" for name, value in list(plain.items())[:5])
