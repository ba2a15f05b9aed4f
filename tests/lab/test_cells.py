"""Measurements are kept as they come, are not made twice, and survive being stopped."""

import os
import signal
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from anyformer.config import ConfigError
from anyformer.lab.cells import SCRATCH, Cell, Local, measure_all, read_results
from anyformer.runs.processes import scratch
from anyformer.training.signals import Signals

CELLS: list[Cell] = [{"x": x, "seed": seed} for x in (1, 2, 3) for seed in (0, 1)]


class Counted:
    """Squares, and counts how often it was asked; may fail at a cell."""

    def __init__(self, fails_at: int | None = None):
        self.asked, self.fails_at = list[dict[str, Any]](), fails_at

    def __call__(self, cell: Cell) -> dict[str, Any]:
        if self.fails_at == len(self.asked):
            raise KeyboardInterrupt
        self.asked.append(dict(cell))
        return {"square": cell["x"] ** 2}


def square(cell: Cell) -> dict[str, Any]:
    return {"square": cell["x"] ** 2}


def test_results_are_in_the_order_of_cells(tmp_path: Path) -> None:
    found = measure_all(square, CELLS, tmp_path / "results.jsonl")
    assert [(r["x"], r["seed"], r["square"]) for r in found] == [(c["x"], c["seed"], c["x"] ** 2) for c in CELLS]


def test_long_silence_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.lab.cells.SECONDS_BETWEEN_LINES", 0.05)
    console = Console(file=StringIO())
    measure_all(lambda cell: time.sleep(0.2) or square(cell), CELLS[:2], tmp_path / "results.jsonl", console=console)
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["0/2  now x=1 seed=0", "0/2  0 s so far  now x=1 seed=0"]
    (first,) = (line for line in lines if line.startswith("1/2  x=1 seed=0  square 1"))
    assert first.endswith(" left")
    assert lines[-1].startswith("2/2  x=1 seed=1  square 1")
    assert not lines[-1].endswith(" left")


def test_side_by_side(tmp_path: Path) -> None:
    found = measure_all(square, CELLS, tmp_path / "results.jsonl", engine=Local(2))
    assert [r.cell for r in found] == CELLS


def is_sigint_blocked(cell: Cell) -> dict[str, Any]:
    return {"blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def test_workers_start_with_ctrl_c_blocked(tmp_path: Path) -> None:
    """One that is still importing modules would print a traceback."""
    found = measure_all(is_sigint_blocked, CELLS[:2], tmp_path / "results.jsonl", engine=Local(2))
    assert all(result["blocked"] for result in found)
    assert not is_sigint_blocked({})["blocked"]


def sleeping(cell: Cell) -> dict[str, Any]:
    with scratch(SCRATCH), Signals():  # as a training has it
        Path(cell["folder"], str(os.getpid())).touch()
        time.sleep(60)
    return {}


def test_whoever_is_told_to_end_ends_the_processes_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a word of theirs, and with their temporary folders."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    pids = tmp_path / "pids"
    pids.mkdir()
    cells = [{"folder": str(pids), "x": x} for x in (1, 2)]

    def end() -> None:
        while len(list(pids.iterdir())) < 2:
            time.sleep(0.05)
        for path in pids.iterdir():  # Ctrl-C reaches all of them
            os.kill(int(path.name), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    with pytest.raises(KeyboardInterrupt):
        measure_all(sleeping, cells, tmp_path / "results" / "results.jsonl", engine=Local(2))
    for process in map(int, (path.name for path in pids.iterdir())):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not list((tmp_path / "temporary").glob(f"{SCRATCH}*"))
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    path, first, second = tmp_path / "results.jsonl", Counted(fails_at=4), Counted()
    with pytest.raises(KeyboardInterrupt):
        measure_all(first, CELLS, path)
    found = measure_all(second, CELLS, path)
    assert first.asked == CELLS[:4]
    assert second.asked == CELLS[4:]
    assert [r.cell for r in found] == CELLS == [r.cell for r in read_results(path)]


def test_half_a_line_is_measured_again(tmp_path: Path) -> None:
    path, again = tmp_path / "results.jsonl", Counted()
    measure_all(square, CELLS, path)
    path.write_bytes(path.read_bytes()[:-20])
    measure_all(again, CELLS, path)
    assert again.asked == CELLS[-1:]
    assert len(read_results(path)) == len(CELLS)


def test_a_line_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"nonsense": 1}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"results\.jsonl:1: is not a result"):
        read_results(path)


class Unsendable(Exception):
    """An error that a process cannot send to another, like some of torch's compiler."""

    def __init__(self, cell: object) -> None:
        super().__init__(f"no result for {cell}")
        self.module = sys


def fail_with_a_module(cell: Cell) -> dict[str, Any]:
    raise Unsendable(cell)


def test_an_error_of_a_worker_arrives_as_text(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Unsendable: no result for"):
        measure_all(fail_with_a_module, CELLS, tmp_path / "results.jsonl", engine=Local(2))
