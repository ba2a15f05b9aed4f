"""Processes that are timed one at a time."""

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.side_by_side import FOLDER, side_by_side

WORKER = """
import sys, threading, time
from pathlib import Path
from benchmarks.side_by_side import alone, join

join()
own, folder = sys.argv[1], Path(sys.argv[2])
over, beats = threading.Event(), folder / f"{own}.beats"


def beat():
    while not over.is_set():
        with beats.open("a") as file:
            file.write(".")
        time.sleep(0.005)


beating = threading.Thread(target=beat)
beating.start()
while not all((folder / f"{name}.beats").exists() for name in "ab"):
    time.sleep(0.005)
with alone():
    others = [path for path in folder.glob("*.beats") if path != beats]
    before = [path.stat().st_size for path in others]
    time.sleep(0.2)
    (folder / f"{own}.seen").write_text(str(before == [path.stat().st_size for path in others]))
over.set()
beating.join()
sys.exit(int(sys.argv[3]))
"""


def test_while_one_is_timed_the_others_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert not side_by_side([["-c", WORKER, name, str(tmp_path), code] for name, code in (("a", "0"), ("b", "3"))])
    assert [(tmp_path / f"{name}.seen").read_text() for name in "ab"] == ["True", "True"]
    assert side_by_side([["-c", "pass"]])
    assert FOLDER not in os.environ
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
