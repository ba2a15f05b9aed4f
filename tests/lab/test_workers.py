"""A grid by workers of which one is killed, over a shared folder or on a Ray cluster, equals one by `--jobs 2`."""

import collections
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from anyformer.config import ConfigError, io
from anyformer.lab import grid as grids
from anyformer.lab.cells import Cell, CellResult, Local, in_words, read_results
from anyformer.lab.claims import claimed
from anyformer.lab.grid import CELLS, Axis, Grid, Steps, run_cell, run_grid, stored_results
from anyformer.lab.ray_engine import RayEngine
from tests.forking import forking
from tests.lab.test_grid import SMALL
from tests.test_cli import done, refused, run

POSITION = Axis(name="position", fields=("model.decoder.position",), values=("sinusoidal", "rotary", "alibi", "none"))
DEPTH = Axis(name="depth", fields=("model.decoder.depth",), values=(1, 2))
GRID = Grid(base="sort", set=SMALL, axes=(POSITION, DEPTH), seeds=(0, 1, 2), budget=Steps(count=20))
NUMBERS = range(24)


@pytest.fixture(scope="module")
def by_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the grid by `--jobs 2`."""
    folder = tmp_path_factory.mktemp("grid")
    run_grid(GRID, folder, engine=Local(2))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    io.save(GRID, tmp_path / "grid.toml")
    return tmp_path / "grid.toml"


def found(results: Sequence[CellResult]) -> dict[str, object]:
    return {in_words(result.cell): result.found for result in results}


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


# -- cells on a shared folder -----------------------------------------------------------------------------------------


def walk(file: Path, numbers: Sequence[int]) -> None:
    """What `for id in ...; do anyformer lab cell grid.toml $id; done` does, with a log of what is trained."""
    real = grids.CellTraining.__call__

    def logged(self: grids.CellTraining, cell: Cell) -> dict[str, object]:
        with (file.parent / "log").open("a") as log:
            print("start", in_words(cell), file=log, flush=True)
            try:
                return real(self, cell)
            finally:
                print("end", in_words(cell), file=log, flush=True)

    grids.CellTraining.__call__ = logged  # type: ignore[method-assign]
    for number in numbers:
        run("lab", "cell", file, str(number), "--out", file.parent / "out")


def test_a_loop_over_ids_with_a_killed_worker_equals_jobs(file: Path, by_jobs: Path) -> None:
    out = file.parent / "out"
    walks = [forking().Process(target=walk, args=(file, numbers)) for numbers in (NUMBERS, NUMBERS[::-1])]
    for process in walks:
        process.start()
    log = file.parent / "log"
    wait_for(lambda: log.exists() and f"start {in_words(GRID.cells()[21])}" in log.read_text())
    walks[1].kill()
    for process in walks:
        process.join()
    assert sorted(stored_results(GRID, out, NUMBERS)) == list(NUMBERS)
    counts = collections.Counter(log.read_text().splitlines())
    starts = [count for line, count in counts.items() if line.startswith("start")]
    assert sorted(starts) == [1] * 23 + [2]  # twice: the cell of the killed worker
    assert all(count == 1 for line, count in counts.items() if line.startswith("end"))
    listed = done("lab", "cell", file, "--out", out).splitlines()
    assert len(listed) == 24
    assert all(line.endswith("  done") for line in listed)
    assert found(run_grid(GRID, out)) == found(read_results(by_jobs / "results.jsonl"))
    assert not (out / CELLS).exists()
    assert sorted(stored_results(GRID, out, NUMBERS)) == list(NUMBERS)


def test_a_cell_that_another_worker_trains_is_skipped(file: Path) -> None:
    out = file.parent / "out"
    with claimed(out / CELLS, "3"):
        result = run("lab", "cell", file, "3", "--out", out)
        assert result.exit_code == 1
        assert f"3  skipped: {out / CELLS}: cell 3 is being trained by process {os.getpid()} on " in result.stderr
        assert f"cell 3 is being trained by process {os.getpid()}" in done("lab", "cell", file, "--out", out)
        with pytest.raises(ConfigError, match="cell 3 is being trained by"):
            run_grid(GRID, out)
    assert not stored_results(GRID, out, [3])


def test_a_cell_of_another_grid_is_refused(file: Path, by_jobs: Path) -> None:
    other = GRID.model_copy(update={"seeds": (5,)})
    with pytest.raises(ConfigError, match="holds results of 3 seeds, not 1 seed: choose another folder"):
        run_cell(other, by_jobs, 0)
    assert refused("lab", "cell", file, "24") == ["there is no cell 24: the grid has the cells 0 to 23"]


def test_a_stored_result_is_not_trained_again(by_jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "timed", None)
    assert run_cell(GRID, by_jobs, 3).cell == GRID.cells()[3]


# -- Ray --------------------------------------------------------------------------------------------------------------


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Processes below a process, with their titles."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            title = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if parent == pid:
            yield int(path.name), title
            yield from descendants(int(path.name))


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of Ray by /proc")
def test_ray_with_a_killed_worker_equals_jobs(file: Path, by_jobs: Path) -> None:
    out = file.parent / "out"
    command = [sys.executable, "-m", "anyformer", "lab", "run", file, "--out", out, "--engine", "ray", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: process.poll() is not None or len(read_results(out / "results.jsonl")) > 3)
            below = dict(descendants(process.pid))
            workers = [pid for pid, title in below.items() if title.startswith("ray::_measure")]
            assert workers, process.communicate()
            os.kill(workers[0], signal.SIGKILL)
            output, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "best: " in output
    assert errors.splitlines()[-1].startswith("24/24  ")
    assert found(read_results(out / "results.jsonl")) == found(read_results(by_jobs / "results.jsonl"))
    wait_for(lambda: not [pid for pid in below if Path(f"/proc/{pid}").exists()], seconds=30)


def test_without_ray_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^--engine = ray needs the package ray: pip install 'anyformer\[ray\]'$"):
        next(RayEngine().run(grids.CellTraining(GRID), GRID.cells(), lambda *_: None))


def test_an_address_where_nothing_listens_is_one_line() -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    with pytest.raises(ConfigError, match=r"^--address = '127\.0\.0\.1:1': no Ray cluster answers there \(.*\)$"):
        next(RayEngine(address="127.0.0.1:1").run(grids.CellTraining(GRID), GRID.cells(), lambda *_: None))


def test_options_that_would_have_no_effect_are_refused(file: Path) -> None:
    for options, message in (
        (["run", file, "--gpus", "0.5"], "--gpus belongs to --engine ray"),
        (["run", file, "--address", "auto"], "--address belongs to --engine ray"),
        (["run", file, "--size", "quick"], "--size is for experiments by name, not for `lab run`: "),
        (["run", file, "--wait"], "--wait belongs to `lab cell GRID ID`"),
        (["cell", file, "1", "--jobs", "2"], "`lab cell` trains in this process, one cell after another: "),
        (["cell", file, "1", "--engine", "ray"], "`lab cell` trains in this process, one cell after another: "),
    ):
        (line,) = refused("lab", *options)
        assert line.startswith(message)


def test_a_missing_package_is_an_error_before_anything_is_measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    (line,) = refused("lab", "run", file)
    assert line.endswith("pip install 'anyformer[lab]'")
