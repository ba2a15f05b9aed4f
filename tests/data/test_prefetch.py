"""A process that reads ahead: the same batches in the same order, and none is left behind by it."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import current_process, get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from anyformer.data.batch import Batch, Example
from anyformer.data.loader import CropLoader, Cursor, ExampleLoader, Loader, OrderedLoader
from anyformer.data.prefetch import MAX_PREFETCHED, PrefetchLoader, can_fork
from anyformer.data.shards import InMemory
from anyformer.recipe import Crops, Ordered, Packed, Padded

PIECES = [Example([1 + i % 5] * (1 + i % 7), [2] * (1 + i % 7), [3] * (1 + i % 4)) for i in range(150)]
TEXT = InMemory(np.arange(500, dtype=np.int32) % 11)
LOADERS: dict[str, Callable[[], Loader]] = {
    "padded": lambda: ExampleLoader(PIECES, Padded(tokens=64), 0, 0, 0),
    "packed": lambda: ExampleLoader(PIECES, Packed(tokens=64, length=16), 0, 0, 0),
    "crops": lambda: CropLoader(TEXT, Crops(rows=4, length=9), 0),
    "ordered": lambda: OrderedLoader(TEXT, Ordered(rows=4, length=9)),
}


def same(one: Batch, other: Batch) -> bool:
    pairs = zip(one, other, strict=True)
    return all(isinstance(y, torch.Tensor) and x.equal(y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


class Growing:
    """Batches of which each is larger than the one before, up to where one fails."""

    def __init__(self, last: int):
        self.last = last

    def read(self, place: Cursor) -> tuple[Batch, Cursor]:
        if place.batch == self.last:
            raise ValueError("no more of them")
        ids = torch.full((1 + 100 * place.batch, 50), place.batch)
        return Batch(ids, ids, None, examples=(place.batch,)), Cursor(0, place.batch + 1)


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_are_the_same(kind: str) -> None:
    """Over several epochs; a place that is asked for again, and one elsewhere."""
    plain, ahead, place = LOADERS[kind](), PrefetchLoader(LOADERS[kind]()), Cursor()
    for number in range(4 * MAX_PREFETCHED):
        if number == 2 * MAX_PREFETCHED:
            place = Cursor(3, 1)
        (batch, after), (wanted, then) = ahead.read(place), plain.read(place)
        assert after == then
        assert same(batch, wanted)
        assert ahead.read(place)[0] is batch
        place = after
    ahead.close()


def test_what_was_read_stays() -> None:
    """Whatever is read after it."""
    ahead, place, kept = PrefetchLoader(LOADERS["crops"]()), Cursor(), []
    for _ in range(3 * MAX_PREFETCHED):
        batch, place = ahead.read(place)
        kept.append((batch, batch.ids.clone()))
    assert all(batch.ids.equal(ids) for batch, ids in kept)


class Failing:
    """Its second batch cannot be read."""

    def __init__(self, error: Callable[[], BaseException]):
        self.error = error

    def read(self, place: Cursor) -> tuple[Batch, Cursor]:
        if place.batch == 1:
            raise self.error()
        ids = torch.full((2, 3), place.batch)
        return Batch(ids, ids, None), Cursor(0, place.batch + 1)


class Stubborn(Exception):
    def __init__(self, number: int, why: str):
        super().__init__(f"{number} {why}")  # so that it cannot be made anew from what it says
        self.held = lambda: number


def test_large_ones_arrive_and_errors_too() -> None:
    ahead, place = PrefetchLoader(Growing(5)), Cursor()
    for number in range(5):
        batch, place = ahead.read(place)
        assert batch.ids.shape == (1 + 100 * number, 50)
        assert (batch.ids == number).all()
    for _ in range(2):  # and the second time it is read here
        with pytest.raises(ValueError, match="no more of them"):
            ahead.read(place)


@pytest.mark.parametrize("error", [lambda: Stubborn(3, "tries"), lambda: SystemExit("3 tries")])
def test_an_error_that_cannot_be_sent_is_told(error: Callable[[], BaseException]) -> None:
    ahead = PrefetchLoader(Failing(error))
    _, place = ahead.read(Cursor())
    with pytest.raises(RuntimeError, match="3 tries"):
        ahead.read(place)


def test_a_reader_that_was_killed_is_told() -> None:
    ahead, place = PrefetchLoader(LOADERS["crops"]()), Cursor()
    _, place = ahead.read(place)
    assert ahead._worker is not None
    ahead._worker.process.kill()

    def rest() -> None:
        at = place
        for _ in range(MAX_PREFETCHED + 2):
            _, at = ahead.read(at)

    with pytest.raises(RuntimeError, match="has ended with -9: was memory short"):
        rest()


def test_it_ends_with_its_owner_and_by_no_signal() -> None:
    ahead, place = PrefetchLoader(LOADERS["crops"]()), Cursor()
    for _ in range(2):  # the second by the process, which is all set then
        _, place = ahead.read(place)
    assert ahead._worker is not None
    process = ahead._worker.process
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever stops a training may stop all of its group
        os.kill(process.pid or 0, number)
    for _ in range(2 * MAX_PREFETCHED):
        _, place = ahead.read(place)
    assert process.is_alive()
    del ahead
    gc.collect()
    assert not process.is_alive()


def test_a_fork_of_the_owner_ends_nothing() -> None:
    ahead, place = PrefetchLoader(LOADERS["crops"]()), Cursor()
    _, place = ahead.read(place)
    other = get_context("fork").Process(target=gc.collect)
    other.start()
    other.join()
    for _ in range(2 * MAX_PREFETCHED):
        _, place = ahead.read(place)


def test_where_there_can_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python lets no daemon have children."""
    assert can_fork()
    monkeypatch.setitem(current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert not can_fork()


OWNER = """
import time
from anyformer.data.prefetch import PrefetchLoader
from anyformer.data.loader import Cursor
from tests.data.test_prefetch import LOADERS
ahead = PrefetchLoader(LOADERS["crops"]())
ahead.read(Cursor())
print(ahead._worker.process.pid, flush=True)
time.sleep(60)
"""


def test_nobody_stays_when_the_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert owner.stdout is not None
    reader = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until = time.monotonic() + 20
    with suppress(OSError):  # it is gone, or a zombie that nobody here has to wait for
        while "State:\tZ" not in Path(f"/proc/{reader}/status").read_text():
            assert time.monotonic() < until
            time.sleep(0.1)
