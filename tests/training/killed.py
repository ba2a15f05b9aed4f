"""Training in a child process that is killed."""

import os
import signal
import threading
from pathlib import Path

import torch

from anyformer.recipe import Recipe
from tests.training.small import run


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def child(recipe: str, out: Path, dies_at_sync: int | None, dies_after: float | None) -> None:
    """Trains in a process of its own, which dies at the n-th time that something is synced to disk, or by the clock."""
    from anyformer.config import io as config_io
    from anyformer.runs import atomic_folder as folder

    torch.set_num_threads(1)
    sync, count = folder._sync, 0

    def dying(path: Path) -> None:
        nonlocal count
        count += 1
        if count == dies_at_sync:
            die()
        sync(path)

    folder._sync = dying
    if dies_after is not None:
        threading.Timer(dies_after, die).start()
    run(config_io.loads(Recipe, recipe), out, resume=True)
