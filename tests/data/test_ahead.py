"""A process that reads ahead: the same batches in the same order, and none is left behind by it."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from anyformer.data.ahead import SLOTS, Ahead
from anyformer.data.batch import Batch, Piece
from anyformer.data.loader import CropLoader, Loader, OrderedLoader, PieceLoader, Place
from anyformer.data.shards import InMemory
from anyformer.recipe import Crops, Ordered, Packed, Padded

PIECES = [Piece([1 + i % 5] * (1 + i % 7), [2] * (1 + i % 7), [3] * (1 + i % 4)) for i in range(150)]
TEXT = InMemory(np.arange(500, dtype=np.int32) % 11)
LOADERS: dict[str, Callable[[], Loader]] = {
    "padded": lambda: PieceLoader(PIECES, Padded(tokens=64), 0, 0, 0),
    "packed": lambda: PieceLoader(PIECES, Packed(tokens=64, length=16), 0, 0, 0),
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

    def read(self, place: Place) -> tuple[Batch, Place]:
        if place.batch == self.last:
            raise ValueError("no more of them")
        ids = torch.full((1 + 100 * place.batch, 50), place.batch)
        return Batch(ids, ids, None, examples=(place.batch,)), Place(0, place.batch + 1)


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_are_the_same(kind: str) -> None:
    """Over several epochs; a place that is asked for again, and one elsewhere."""
    plain, ahead, place = LOADERS[kind](), Ahead(LOADERS[kind]()), Place()
    for number in range(4 * SLOTS):
        if number == 2 * SLOTS:
            place = Place(3, 1)
        (batch, after), (wanted, then) = ahead.read(place), plain.read(place)
        assert after == then
        assert same(batch, wanted)
        assert ahead.read(place)[0] is batch
        place = after
    ahead.close()


def test_what_was_read_stays() -> None:
    """Whatever is read after it."""
    ahead, place, kept = Ahead(LOADERS["crops"]()), Place(), []
    for _ in range(3 * SLOTS):
        batch, place = ahead.read(place)
        kept.append((batch, batch.ids.clone()))
    assert all(batch.ids.equal(ids) for batch, ids in kept)


def test_large_ones_arrive_and_errors_too() -> None:
    ahead, place = Ahead(Growing(5)), Place()
    for number in range(5):
        batch, place = ahead.read(place)
        assert batch.ids.shape == (1 + 100 * number, 50)
        assert (batch.ids == number).all()
    with pytest.raises(ValueError, match="no more of them"):
        ahead.read(place)


def test_a_reader_that_was_killed_is_told() -> None:
    ahead, place = Ahead(LOADERS["crops"]()), Place()
    _, place = ahead.read(place)
    assert ahead._reader is not None
    ahead._reader.process.kill()

    def rest() -> None:
        at = place
        for _ in range(SLOTS + 2):
            _, at = ahead.read(at)

    with pytest.raises(RuntimeError, match="has ended with -9"):
        rest()


def test_it_ends_with_its_owner() -> None:
    ahead = Ahead(LOADERS["crops"]())
    ahead.read(Place())
    assert ahead._reader is not None
    process = ahead._reader.process
    assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGINT)  # whoever stops a training stops all in its group
    ahead.read(ahead.read(Place())[1])
    assert process.is_alive()
    del ahead
    gc.collect()
    process.join(10)
    assert not process.is_alive()


OWNER = """
import time
from anyformer.data.ahead import Ahead
from anyformer.data.loader import Place
from tests.data.test_ahead import LOADERS
ahead = Ahead(LOADERS["crops"]())
ahead.read(Place())
print(ahead._reader.process.pid, flush=True)
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
    while time.monotonic() < until and Path(f"/proc/{reader}").exists():
        if "\nState:\tZ" in Path(f"/proc/{reader}/status").read_text():  # nobody here has to wait for it
            break
        time.sleep(0.1)
    else:
        assert time.monotonic() < until
