"""A timed measurement runs alone, also beside measurements of other processes."""

import multiprocessing
import tempfile
import time
from pathlib import Path

import pytest

from anyformer.lab.alone import alone, beside_others


def train(folder: str, until: float) -> None:
    tempfile.tempdir = folder
    while time.time() < until:
        with beside_others():
            mark = Path(folder) / f"training-{multiprocessing.current_process().name}"
            mark.touch()
            time.sleep(0.02)
            mark.unlink()


def test_no_measurement_runs_beside_a_timed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=train, args=(str(tmp_path), time.time() + 1.5)) for _ in range(3)]
    for process in others:
        process.start()
    time.sleep(0.2)
    for _ in range(5):
        with beside_others(), alone():  # does not wait for ever: new trainings wait at the gate
            assert not list(tmp_path.glob("training-*"))
            time.sleep(0.03)
            assert not list(tmp_path.glob("training-*"))
        time.sleep(0.05)
    assert any(process.is_alive() for process in others)
    for process in others:
        process.join()
        assert process.exitcode == 0
