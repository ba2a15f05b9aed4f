"""A phase that takes longer than its limit ends the process with one line; others do not."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from anyformer.training.signals import TICKS, Watchdog

ROOT = Path(__file__).parents[2]
SHORT = TICKS - 1
HANGS = """
import threading
from anyformer.runs.processes import locked
from anyformer.training.signals import TICKS, Watchdog
from pathlib import Path
with Watchdog(0.2) as dog, locked(Path("run")):
    dog.enter("step 7")
    {hang}
"""


def hang(tmp_path: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HANGS.format(hang=code)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_hang_ends_with_its_step_and_rank(tmp_path: Path) -> None:
    done = hang(tmp_path, "threading.Event().wait()", RANK="3")
    assert done.returncode == 1
    assert done.stderr.startswith("rank 3: no progress for 0.2 s (parallel.timeout) at step 7, waiting ")
    assert done.stderr.count("\n") == 1


def test_the_line_names_the_function_of_the_package(tmp_path: Path) -> None:
    """The lock of a folder that this process holds itself is never free."""
    done = hang(tmp_path, "locked(Path('run'), wait=True).__enter__()")
    assert "waiting in _acquire (processes.py:" in done.stderr


def test_short_phases_have_a_limit_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, limit: ended.append(clock.ticks))
    dog = Watchdog(0.2)

    class Clock:
        ticks = 0

        def wait(self, _: float) -> bool:
            """A new phase begins one tick before the end of each but the fourth."""
            self.ticks += 1
            if self.ticks % SHORT == 0 and self.ticks != 5 * SHORT:
                dog.enter(f"step {self.ticks}")
            return bool(ended) or self.ticks > 20 * SHORT

    dog._done = clock = Clock()
    dog._watch(0.2)
    assert ended == [5 * SHORT]


def test_the_thread_ends_with_the_context() -> None:
    with Watchdog(60):
        (thread,) = (one for one in threading.enumerate() if one.name == "watchdog")
    thread.join(30)
    assert not thread.is_alive()


def test_time_in_which_the_process_is_stopped_does_not_count(tmp_path: Path) -> None:
    code = "print('begun', flush=True); threading.Event().wait(0.1); dog.enter('the end'); print('done', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS.format(hang=code)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "done\n"
    assert process.returncode == 0


def test_without_a_limit_there_is_no_thread() -> None:
    with Watchdog() as dog:
        dog.enter("step 1")
        assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
