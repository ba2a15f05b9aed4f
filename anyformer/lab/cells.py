"""Run many small measurements in parallel, and store each result as soon as it is done.

A cell is a setting in plain JSON; a measurement depends on its cell alone. Results are appended to a file line by line.
Cells with a stored result are not measured again, so interrupted work resumes where it stopped.
"""

import json
import multiprocessing
import os
import pickle
import platform
import signal
import statistics
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from anyformer import __version__
from anyformer.config import ConfigError, Fault
from anyformer.config.io import write_file
from anyformer.kernels.hardware import usable_cores
from anyformer.lab.alone import beside_others
from anyformer.runs.processes import end_with_parent, remove_abandoned
from anyformer.runs.run import writing
from anyformer.training.plan import duration

SECONDS_BETWEEN_LINES = 30.0  # where there is no terminal
SCRATCH = "anyformer-lab-"  # prefix of the names of temporary folders

Cell = Mapping[str, Any]
Measure = Callable[[Cell], dict[str, Any]]


@dataclass(frozen=True)
class CellResult:
    """The measurement of one cell."""

    cell: dict[str, Any]
    found: dict[str, Any]
    seconds: float
    machine: str
    rule: str = ""  # hash of the rule under which it was measured; of a grid, nothing

    def __getitem__(self, name: str) -> Any:
        return self.found[name] if name in self.found else self.cell[name]


Notify = Callable[[CellResult | None, Sequence[Cell]], None]


class CellEngine(ABC):
    """Where cells are measured."""

    @abstractmethod
    def run(self, measure: Measure, cells: Sequence[Cell], notify: Notify) -> Iterator[CellResult]:
        """Yield results as they are completed. Call `notify` with each, and with the cells in work."""


@dataclass(frozen=True)
class Local(CellEngine):
    """Processes of this machine, which share its cores."""

    jobs: int = 1  # measurements in parallel

    def run(self, measure: Measure, cells: Sequence[Cell], notify: Notify) -> Iterator[CellResult]:
        return _measured(measure, cells, self.jobs, notify)


def measure_all(
    measure: Measure,
    cells: Sequence[Cell],
    path: Path,
    *,
    engine: CellEngine | None = None,
    console: Console | None = None,
) -> list[CellResult]:
    """Return the results of all cells in order; stored results are read from the file.

    `measure` must be picklable. The default engine is `Local`, with one measurement at a time.
    """
    done = {key(result.cell): result for result in read_results(path)}
    left = [cell for cell in cells if key(cell) not in done]
    for result in measure_each(measure, left, len(cells), engine=engine, console=console):
        append(path, result)
        done[key(result.cell)] = result
    return [done[key(cell)] for cell in cells]


def measure_each(
    measure: Measure,
    cells: Sequence[Cell],
    total: int,
    *,
    engine: CellEngine | None = None,
    console: Console | None = None,
) -> Iterator[CellResult]:
    """Yield the results of cells as they are completed, and show progress: `total` counts stored results, too."""
    if cells:
        with _progress(console or Console(quiet=True), total, total - len(cells)) as notify:
            yield from (engine or Local()).run(measure, cells, notify)


def key(cell: Cell) -> str:
    """Return the string that identifies a cell."""
    return json.dumps(cell, sort_keys=True, ensure_ascii=False)


def _measured(measure: Measure, cells: Sequence[Cell], jobs: int, notify: Notify) -> Iterator[CellResult]:
    threads = max(1, min(torch.get_num_threads(), usable_cores() // jobs))  # OMP_NUM_THREADS may say fewer
    if jobs == 1 or len(cells) < 2:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for cell in cells:
                notify(None, [cell])
                result = timed(measure, cell)
                notify(result, [])
                yield result
        finally:
            torch.set_num_threads(before)
        return
    context, given = multiprocessing.get_context("spawn"), (threads, os.getpid())
    with (
        terminable(),
        ProcessPoolExecutor(min(jobs, len(cells)), context, initializer=_begin, initargs=given) as pool,
    ):
        waiting, running = list(cells), dict[Future[CellResult], Cell]()
        try:
            while waiting or running:
                while waiting and len(running) < jobs:  # few at a time, so that an interrupt is quick
                    cell = waiting.pop(0)
                    with _interrupt_held_back():
                        running[pool.submit(_in_worker, measure, cell)] = cell
                notify(None, list(running.values()))
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    result = future.result()
                    notify(result, list(running.values()))
                    yield result
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
                process.join()
            remove_abandoned(Path(tempfile.gettempdir()), f"{SCRATCH}*")  # theirs
            raise


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that worker processes are stopped as well."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Delay Ctrl-C while workers are started. They inherit it, so that none prints a traceback of its imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(threads: int, parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(threads)


def timed(measure: Measure, cell: Cell) -> CellResult:
    """Measure a cell in this process."""
    with beside_others():
        began = time.perf_counter()
        found = measure(cell)
        return CellResult(dict(cell), found, round(time.perf_counter() - began, 2), machine())


def _in_worker(measure: Measure, cell: Cell) -> CellResult:
    """Measure a cell; an error that cannot be sent to the parent process is replaced by its text."""
    try:
        return timed(measure, cell)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError("".join(traceback.format_exception(error))) from None
        raise


def machine() -> str:
    """Return the device and versions of a measurement."""
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        where = f"{_processor()}, {torch.get_num_threads()} of {usable_cores()} cores"
    return f"{where}, torch {torch.__version__.partition('+')[0]}, anyformer {__version__}"


@cache
def _processor() -> str:
    """Return the name of the CPU, or its architecture if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else f"{platform.machine()} CPU"


# -- the file ---------------------------------------------------------------------------------------------------------


def read_results(path: Path) -> list[CellResult]:
    """Return the results of a file, empty if it does not exist; an incomplete last line is skipped."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.append(CellResult(**json.loads(line)))
        except (ValueError, TypeError):
            raise ConfigError([Fault(f"{path}:{number}", "is not a result: fix or delete this line")]) from None
    return found


def read_result(path: Path) -> CellResult | None:
    """Return the result of one cell that `write_result` stored; None if there is none."""
    return next(iter(read_results(path)), None)


def write_result(path: Path, result: CellResult) -> None:
    """Store the result of one cell atomically as a separate file: several machines may write to one folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        write_file(path, _line(result))


def append(path: Path, result: CellResult) -> None:
    """Append a result and flush it to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), path.open("a+b") as file:
        _cut_half_line(file)
        file.write(_line(result))
        file.flush()
        os.fsync(file.fileno())


def _line(result: CellResult) -> bytes:
    known = {name: value for name, value in result.__dict__.items() if name != "rule" or value}
    return (json.dumps(known, ensure_ascii=False) + "\n").encode()


def _cut_half_line(file: Any) -> None:
    file.seek(0)
    text = file.read()
    file.truncate(text.rfind(b"\n") + 1)


# -- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(console: Console, total: int, done: int) -> Iterator[Notify]:
    """Print a line for each completed cell; also show a bar on a terminal, and elsewhere a line after silence."""
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
    task, now = bar.add_task("", total=total, completed=done, note=""), ""
    seconds, began, over, jobs = list[float](), time.perf_counter(), threading.Event(), 1

    def show(text: str) -> None:
        if seconds and (left := total - done - len(seconds)):
            text += f"  about {duration(statistics.mean(seconds) * max(1, left / jobs))} left"
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    def notify(result: CellResult | None, running: Sequence[Cell]) -> None:
        nonlocal now, jobs
        now, jobs = "; ".join(map(in_words, running)), max(jobs, len(running))
        if result is not None:
            seconds.append(result.seconds)
            bar.advance(task)
            count = f"{done + len(seconds)}/{total}"
            show(f"{count}  {in_words(result.cell)}  {shown(result.found)}  {result.seconds:.0f} s")
        elif not seconds and not console.is_terminal:  # the first cells, at once
            show(f"{done}/{total}  now {now}")
        bar.update(task, note=now)

    def show_signs_of_life() -> None:
        while not over.wait(SECONDS_BETWEEN_LINES):
            show(f"{done + len(seconds)}/{total}  {time.perf_counter() - began:.0f} s so far  now {now}")

    thread = threading.Thread(target=show_signs_of_life, daemon=True)
    with bar:
        if not console.is_terminal and not console.quiet:
            thread.start()
        try:
            yield notify
        finally:
            over.set()


def in_words(cell: Cell) -> str:
    return " ".join(f"{name}={value}" for name, value in cell.items())


def shown(found: Mapping[str, Any]) -> str:
    """Return the first plain numbers of a result, and the names of its true flags."""
    plain = {name: value for name, value in found.items() if isinstance(value, int | float) and value is not False}
    return "  ".join(name if value is True else f"{name} {value:.4g}" for name, value in list(plain.items())[:4])
