"""A claim is held by one worker; that of a dead worker is taken over, however many try."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from anyformer.lab import claims
from anyformer.lab.claims import WHOLE, Claimed, claimed, holder
from tests.forking import forking

NOBODY = {"pid": 1, "host": "elsewhere", "machine": "another", "started": "yesterday"}


def abandon(folder: Path, name: str = "7", number: int = 1, age: float = 0.0, **owner: object) -> Path:
    """A claim file of a worker of another machine, last renewed some seconds ago."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.claim-{number}"
    path.write_text(json.dumps({**NOBODY, **owner}))
    os.utime(path, (time.time() - age,) * 2)
    return path


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_claim_is_held_by_one_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cells"
    for _ in range(2):
        with claimed(folder, "7"):
            assert f"cell 7 is being trained by process {os.getpid()} on " in str(holder(folder, "7"))
            with pytest.raises(Claimed, match=r"cell 7 is being trained by process .*: wait until it ends"):
                claimed(folder, "7").__enter__()
            with claimed(folder, "8"):
                pass
        assert holder(folder, "7") is None
        assert not folder.exists()


def test_all_cells_exclude_each_and_each_excludes_all(tmp_path: Path) -> None:
    for held, refused in ((WHOLE, "7"), ("7", WHOLE), (WHOLE, WHOLE)):
        with claimed(tmp_path, held), pytest.raises(Claimed, match="being trained by"):
            claimed(tmp_path, refused).__enter__()


def test_a_claim_that_is_renewed_is_respected_until_the_limit(tmp_path: Path) -> None:
    path = abandon(tmp_path, age=claims.DEAD_AFTER - 5)
    with pytest.raises(Claimed, match="cell 7 is being trained by process 1 on elsewhere since yesterday"):
        claimed(tmp_path, "7").__enter__()
    os.utime(path, (time.time() - claims.DEAD_AFTER - 1,) * 2)
    with claimed(tmp_path, "7"):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["7.claim-1", "7.claim-2"]
        assert f"process {os.getpid()} " in str(holder(tmp_path, "7"))
    assert not tmp_path.exists()


def test_a_claim_that_is_not_written_yet_is_respected(tmp_path: Path) -> None:
    (tmp_path / "7.claim-1").touch()
    with pytest.raises(Claimed, match="cell 7 is being trained by another worker"):
        claimed(tmp_path, "7").__enter__()


def hold(folder: Path, begun: Path) -> None:
    with claimed(folder, "7"):
        begun.touch()
        time.sleep(60)


@contextmanager
def holding(tmp_path: Path) -> Iterator[int]:
    process = forking().Process(target=hold, args=(tmp_path / "cells", tmp_path / "begun"))
    process.start()
    try:
        wait_for((tmp_path / "begun").exists)
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


def test_a_killed_worker_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "cells"
    with holding(tmp_path) as pid, pytest.raises(Claimed, match=f"process {pid} "):
        claimed(folder, "7").__enter__()
    assert list(folder.iterdir())
    with claimed(folder, "7"):
        pass


def test_of_many_that_take_over_one_succeeds(tmp_path: Path) -> None:
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        abandon(folder, age=2 * claims.DEAD_AFTER)
        start, won, stack = threading.Barrier(8), list[int](), ExitStack()

        def compete(number: int, folder=folder, start=start, won=won, stack=stack) -> None:
            start.wait()
            try:
                stack.enter_context(claimed(folder, "7"))
                won.append(number)
            except Claimed:
                pass

        threads = [threading.Thread(target=compete, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with stack:
            assert len(won) == 1


def test_a_claim_can_be_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SECONDS_BETWEEN_LOOKS", 0.01)
    path = abandon(tmp_path)
    threading.Timer(0.1, path.unlink).start()
    with claimed(tmp_path, "7", wait=True):
        assert f"process {os.getpid()} " in str(holder(tmp_path, "7"))


def work_until_interrupted(folder: Path) -> None:
    with claimed(folder, "7"):
        renewed = (folder / "7.claim-1").stat().st_mtime_ns
        wait_for(lambda: (folder / "7.claim-1").stat().st_mtime_ns > renewed)
        abandon(folder, number=2)
        wait_for(lambda: False)


def test_work_whose_claim_was_taken_over_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a suspension of more than a minute."""
    monkeypatch.setattr(claims, "SECONDS_BETWEEN_RENEWALS", 0.01)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(Claimed, match="cell 7 is taken over: this worker did not renew"):
            work_until_interrupted(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in tmp_path.iterdir()] == ["7.claim-2"]
