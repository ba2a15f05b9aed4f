"""A program that is told to stop keeps what it has done, and its exit code says so; no worker outlives it."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from anyformer.cli.app import app, main
from anyformer.config import io
from anyformer.lab.cells import Cell, Local, measure_all
from anyformer.lab.trial import trial
from anyformer.recipe.ready import read_recipe
from anyformer.runs.run import checkpoints, load
from anyformer.training import loop, signals, train as training
from anyformer.training.signals import Signals
from tests.forking import forking, reopen
from tests.training.small import Watched, interrupt, pairs


def test_signals_within_a_second_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Signals() as found:
        for _ in range(3):
            interrupt()
            now += 0.4
        assert found.received
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_inner_context_knows_what_the_outer_noted() -> None:
    told: list[int] = []
    with Signals(lambda: told.append(1)) as outer:
        with Signals() as inner:
            interrupt()
            assert inner.received
        assert outer.received
        with Signals() as later:
            assert later.received
    assert told == [1]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Signals() as found:
            interrupt()
            assert not found.received
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# -- train ------------------------------------------------------------------------------------------------------------


def twice() -> None:
    interrupt()
    interrupt()


def insist() -> None:
    interrupt()
    signals.GRACE = -1.0
    interrupt()


def while_reading(number: int, act: Callable[[], None]) -> None:
    """Act before a batch is read for the n-th time."""
    real = loop.read_batches
    watched: list[Any] = []

    def read(loader: Any, *rest: Any) -> Any:
        watched.append(Watched(loader, number, act) if not watched else watched[0])
        return real(watched[0], *rest)

    loop.read_batches = read


def before(module: Any, name: str, act: Callable[[], None]) -> None:
    """Act before a function of a module is called."""
    real = getattr(module, name)
    setattr(module, name, lambda *given, **named: (act(), real(*given, **named))[1])


STOPS: dict[str, Callable[[], None]] = {
    "two at once": lambda: while_reading(3, twice),
    "while starting": lambda: before(training, "prepare", interrupt),
    "while starting, insisting": lambda: before(training, "prepare", insist),
    "before a checkpoint, insisting": lambda: while_reading(3, insist),
    "after a checkpoint, insisting": lambda: while_reading(6, insist),
    "while finishing": lambda: before(training, "finish", twice),
    "none": lambda: None,
}


def program(home: Path, stop: str, arguments: list[str]) -> None:
    """The program in this process, with a stop at some moment."""
    os.chdir(home)
    reopen("/dev/null", home / "out.txt", home / "err.txt")
    training.draw_curve = lambda folder: None
    STOPS[stop]()
    sys.argv = ["anyformer", *arguments]
    main()


def stopped(home: Path, stop: str, *more: str) -> tuple[int | None, list[str]]:
    """The exit code of a training that a signal stops, and its lines on stderr."""
    io.save(pairs(steps=8, save_every=4), home / "recipe.toml")
    process = forking().Process(target=program, args=(home, stop, ["train", "recipe.toml", "--out", "run", *more]))
    process.start()
    process.join(60)
    return process.exitcode, (home / "err.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("stop", "code", "step"),
    [
        ("two at once", 3, 3),
        ("while starting", 3, 1),
        ("while starting, insisting", 1, None),
        ("before a checkpoint, insisting", 1, None),
        ("after a checkpoint, insisting", 3, 4),
        ("while finishing", 0, 8),
    ],
)
def test_exit_code_3_means_saved(tmp_path: Path, stop: str, code: int, step: int | None) -> None:
    found, lines = stopped(tmp_path, stop)
    assert found == code, lines
    assert [int(path.name.removeprefix("step-")) for path in checkpoints(tmp_path / "run")][-1:] == [step][: bool(step)]
    assert not [line for line in lines if "Traceback" in line]
    if code == 1:
        assert lines[-1] == "interrupted before the first checkpoint: nothing is saved"
    if code == 0:
        assert load(tmp_path / "run").folder == tmp_path / "run"
    again, _ = stopped(tmp_path, "while starting", "--resume")
    assert again == (0 if code == 0 else 3)


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("importing", [True, False])
def test_an_interrupted_dry_run_speaks_of_no_checkpoint(monkeypatch: pytest.MonkeyPatch, importing: bool) -> None:
    if importing:
        module = ModuleType("plan")
        module.__getattr__ = stop  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, "anyformer.training.plan", module)
    else:
        monkeypatch.setattr("anyformer.training.plan.plan", stop)
    result = CliRunner().invoke(app, ["train", "sort", "--dry-run"])
    assert (result.exit_code, result.output) == (1, "interrupted\n")


# -- workers ----------------------------------------------------------------------------------------------------------


def sleeping(cell: Cell) -> dict[str, Any]:
    Path(cell["folder"], str(os.getpid())).touch()
    time.sleep(60)
    return {}


def measuring(pids: Path) -> None:
    cells = [{"folder": str(pids), "x": x} for x in (1, 2)]
    measure_all(sleeping, cells, pids.parent / "results.jsonl", engine=Local(2))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_of_the_lab_end_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    process = forking().Process(target=measuring, args=(pids,))
    process.start()
    until = time.monotonic() + 60
    while len(list(pids.iterdir())) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.join()
    until = time.monotonic() + 5
    while any(alive(int(path.name)) for path in pids.iterdir()):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_stopped_lab_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(
        'base = "sort"\nset = ["data.train.count=100", "data.valid.count=10"]\n'
        'axes = [{ name = "width", fields = ["model.width"], values = [16] }]\nseeds = [0]\n'
        'budget = { kind = "steps", count = 100000 }\n'
    )
    process = forking().Process(target=program, args=(tmp_path, "none", ["lab", "run", "grid.toml", "--out", "out"]))
    process.start()
    until = time.monotonic() + 60
    while not (tmp_path / "out" / "grid.toml").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.5)
    process.terminate()
    process.join(30)
    assert process.exitcode == 3
    lines = (tmp_path / "err.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("0/1")] == [  # that line shows which training runs
        "1 training of 100,000 steps; a line for each that is finished",
        "interrupted: finished results are kept; the same command measures the rest",
    ]


def test_a_signal_in_the_last_evaluation_stops_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came after the last check of the training loop, and the next training began."""
    monkeypatch.setattr("anyformer.training.loop._validate", lambda *_: interrupt())
    recipe = read_recipe("sort", ["train.steps=1", "data.train.count=20", "data.valid.count=5"])
    with pytest.raises(KeyboardInterrupt):
        trial(recipe)
