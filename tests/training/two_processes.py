"""Two processes as torchrun starts them, and a comparison of runs."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anyformer import cli
from anyformer.recipe import Adam
from tests.forking import forking, reopen
from tests.training.small import metrics

SMOOTH = Adam(lr=1e-2, eps=1e-2)  # a large eps: rounding of tiny gradients does not decide signs


class Rank:
    """A process with what torchrun tells it, which acts; what it says and complains of is in two files."""

    def __init__(self, folder: Path, rank: int, count: int, port: int, act: Callable[..., None], *args: Any):
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        self.files = [folder / f"{name}-{rank}" for name in ("out", "complaints")]
        env = here | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.process = forking().Process(target=enter, args=(env, self.files, act, *args))
        self.process.start()


def enter(env: Mapping[str, str], files: Sequence[Path], act: Callable[..., None], *args: Any) -> None:
    os.environ.update(env)
    reopen(os.devnull, *files)
    act(*args)


def command(*words: str | Path) -> None:
    sys.argv = ["anyformer", *map(str, words)]
    cli.main()


def spawn(folder: Path, act: Callable[..., None], *args: Any, count: int = 2) -> list[Rank]:
    """Processes, as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [Rank(folder, rank, count, port, act, *args) for rank in range(count)]


def ends(ranks: list[Rank]) -> tuple[list[int | None], list[str], list[str]]:
    """Exit codes, and what was said and complained of."""
    try:
        for rank in ranks:
            rank.process.join(timeout=240)
    finally:
        for rank in ranks:
            rank.process.kill()
    out, complaints = ([rank.files[i].read_text() for rank in ranks] for i in range(2))
    return [rank.process.exitcode for rank in ranks], out, complaints


def wait(path: Path, alive: Callable[[], bool]) -> None:
    """Until there is such a file, or nobody who could write it."""
    while not path.exists() and alive():
        time.sleep(0.02)


def curves(out: Path) -> Iterator[dict[str, float]]:
    for row in metrics(out):
        yield {name: value for name, value in row.items() if "loss" in name or name in ("step", "lr", "grad_norm")}


def assert_alike(a: Path, b: Path, tolerance: float = 1e-5) -> None:
    for one, other in zip(curves(a), curves(b), strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    left, right = (load_file(out / "model.safetensors") for out in (a, b))
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance)
