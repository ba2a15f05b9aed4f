"""A timed measurement runs alone, also beside measurements of other processes."""

import multiprocessing
import tempfile
import time
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path

import pytest

from anyformer.lab.alone import alone, beside_others


def train(folder: str, over: Event, trained: Semaphore) -> None:
    tempfile.tempdir = folder
    while not over.is_set():
        with beside_others():
            mark = Path(folder) / f"training-{multiprocessing.current_process().name}"
            mark.touch()
            time.sleep(0.02)
            mark.unlink()
        trained.release()


def test_no_measurement_runs_beside_a_timed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    context = multiprocessing.get_context("fork")
    over, trained = context.Event(), context.Semaphore(0)
    others = [context.Process(target=train, args=(str(tmp_path), over, trained)) for _ in range(3)]
    for process in others:
        process.start()
    for _ in range(5):
        for _ in range(3):  # they train between measurements
            assert trained.acquire(timeout=60)
        with beside_others(), alone():  # does not wait for ever: new trainings wait at the gate
            assert not list(tmp_path.glob("training-*"))
            time.sleep(0.03)
            assert not list(tmp_path.glob("training-*"))
    over.set()
    for process in others:
        process.join()
        assert process.exitcode == 0
