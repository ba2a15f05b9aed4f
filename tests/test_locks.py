"""A folder has one writer at a time, however that writer ends; leftovers of killed processes are removed."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anyformer.config import ConfigError, io
from anyformer.data.chunks import ChunkedFiles
from anyformer.data.shard_writer import prepare
from anyformer.interop import import_model
from anyformer.lab.grid import Grid, load_grid, run_grid
from anyformer.recipe import Characters, Recipe
from anyformer.runs.processes import LOCK, locked, scratch
from anyformer.runs.run import load, write_folder
from anyformer.training import train as training
from tests.forking import forking
from tests.training.small import pairs, quiet, text

GRID = """
base = "sort"
axes = [{ name = "width", fields = ["model.width"], values = [16] }]
seeds = [0]
budget = { kind = "steps", count = 200 }
"""


def stay(*_: Any, **__: Any) -> None:
    """Show that the work has begun, and never finish it."""
    Path("begun").touch()
    time.sleep(60)


def train_slowly(home: Path, recipe: str) -> None:
    training.fit = stay
    training.train(io.loads(Recipe, recipe), home / "out", console=quiet())


def prepare_slowly(home: Path, recipe: str) -> None:
    prepare([home / "text.txt"], home / "out", Characters(), ChunkedFiles(), progress=stay)


def lab_slowly(home: Path, recipe: str) -> None:
    from anyformer.lab import grid

    grid.measure_all = stay
    run_grid(load_grid(home / "grid.toml"), home / "out")


def import_slowly(home: Path, recipe: str) -> None:
    from anyformer import interop

    interop.from_hf = stay
    import_model(home / "public", home / "out")


def fill_slowly(home: Path, recipe: str) -> None:
    write_folder(home / "out", stay)


def scratch_slowly(home: Path, recipe: str) -> None:
    tempfile.tempdir = str(home)
    with scratch("anyformer-lab-"):
        stay()


def enter(home: Path, work: Callable[[Path, str], None], recipe: str) -> None:
    os.chdir(home)
    work(home, recipe)


@contextmanager
def busy(home: Path, work: Callable[[Path, str], None], recipe: str = "") -> Iterator[int]:
    """Another process that is in the middle of some work; killed at the end."""
    process = forking().Process(target=enter, args=(home, work, recipe))
    process.start()
    try:
        until = time.monotonic() + 30
        while not (home / "begun").exists():
            assert process.is_alive()
            assert time.monotonic() < until
            time.sleep(0.01)
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    return str(caught.value)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.runs.processes.PATIENCE", 0.1)


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    recipe, out = pairs(steps=2), tmp_path / "out"
    with busy(tmp_path, train_slowly, io.dumps(recipe)) as pid:
        before = sorted(out.iterdir())
        for resume in (False, True):
            told = refused(lambda resume=resume: training.train(recipe, out, resume=resume, console=quiet()))
            assert told.startswith(f"{out}: is in use by process {pid} on ")
        assert sorted(out.iterdir()) == before
    training.train(recipe, out, resume=True, console=quiet())  # the lock of a killed process counts for nothing
    assert not (out / LOCK).exists()
    load(out)


def test_a_folder_that_only_holds_an_abandoned_lock_is_empty(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("")
    training.train(pairs(steps=2), tmp_path, console=quiet())
    assert not (tmp_path / LOCK).exists()


def test_a_refused_training_leaves_nothing(tmp_path: Path) -> None:
    missing = [f"data.root={tmp_path / 'none'}"]
    refused(lambda: training.train("scan", tmp_path / "runs" / "out", missing, console=quiet()))
    assert list(tmp_path.iterdir()) == []


def test_two_preparations_do_not_share_a_folder(tmp_path: Path) -> None:
    text(tmp_path)
    paths, out = [tmp_path / "text.txt"], tmp_path / "out"
    with busy(tmp_path, prepare_slowly) as pid:
        assert f"in use by process {pid} on " in refused(lambda: prepare(paths, out, Characters(), ChunkedFiles()))
    prepare(paths, out, Characters(), ChunkedFiles())
    assert not (out / LOCK).exists()


def test_two_grids_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    grid, out = io.loads(Grid, GRID), tmp_path / "out"
    with busy(tmp_path, lab_slowly) as pid:
        assert f"in use by process {pid} on " in refused(lambda: run_grid(grid, out))


def test_two_imports_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "public").mkdir()
    with busy(tmp_path, import_slowly) as pid:
        told = refused(lambda: import_model(tmp_path / "public", tmp_path / "out"))
        assert told.startswith(f"{tmp_path / 'out'}: is in use by process {pid} on ")


def test_what_a_killed_write_left_is_removed_by_the_next(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_text("a")

    with busy(tmp_path, fill_slowly):
        write_folder(tmp_path / "other", fill)
        assert [path.name for path in tmp_path.glob(".tmp-*")] == [".tmp-out"], "its writer is alive"
    (tmp_path / ".tmp-mine").mkdir()  # not ours
    write_folder(tmp_path / "third", fill)
    assert [path.name for path in tmp_path.glob(".tmp-*")] == [".tmp-mine"]
    assert sorted(path.name for path in (tmp_path / "third").iterdir()) == ["a", "manifest.json"]


def test_scratch_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with busy(tmp_path, scratch_slowly), scratch("anyformer-lab-"):
        assert len(list(tmp_path.glob("anyformer-lab-*"))) == 2
    with scratch("anyformer-lab-") as folder:
        assert list(tmp_path.glob("anyformer-lab-*")) == [folder]
    assert not list(tmp_path.glob("anyformer-lab-*"))


def test_a_lock_is_released_by_any_end(tmp_path: Path) -> None:
    for end in (RuntimeError, KeyboardInterrupt, None):
        try:
            with locked(tmp_path / "a"):
                assert f"process {os.getpid()} " in refused(lambda: locked(tmp_path / "a").__enter__())
                if end:
                    raise end
        except (RuntimeError, KeyboardInterrupt):
            pass
        assert not (tmp_path / "a").exists()


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for work in (
        lambda: training.train(pairs(steps=2), tmp_path / "out", console=quiet()),
        lambda: prepare([tmp_path / "out"], tmp_path / "out", Characters(), ChunkedFiles()),
        lambda: run_grid(io.loads(Grid, GRID), tmp_path / "out"),
    ):
        assert refused(work) == f"{tmp_path / 'out'}: is not a folder"
