"""Child processes that have torch and the package already: importing them takes longer than most of what they do."""

import contextlib
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = [
    "anyformer.cli",
    "anyformer.training.train",
    "matplotlib.pyplot",
    "torch.utils.tensorboard",
    "torch._dynamo",
    "tests.data.test_shards",
    "tests.training.small",
]


def forking() -> ForkServerContext:
    """Whoever asks first starts the server for all: it knows the modules of everyone, and looks for them here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    with contextlib.chdir(ROOT):
        forkserver.ensure_running()
    return context


def reopen(before: str | Path, out: str | Path, complaints: str | Path) -> None:
    """From now on this process reads the first file, says into the second, and complains at the end of the third."""
    for fd, path, how in ((0, before, "r"), (1, out, "w"), (2, complaints, "a")):
        with open(path, how, encoding="utf-8") as file:
            os.dup2(file.fileno(), fd)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, how) for fd, how in ((0, "r"), (1, "w"), (2, "w")))
