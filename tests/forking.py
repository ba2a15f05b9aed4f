"""Child processes that have torch and the package already: importing them takes longer than most of what they do."""

import contextlib
import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = [
    "anyformer.cli",
    "anyformer.training.train",
    "matplotlib.pyplot",
    "torch.utils.tensorboard",
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
