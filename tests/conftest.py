"""What every test shares: one thread, a fixed seed, and how hard hypothesis looks."""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Two workers on two cores: more threads only make them wait for each other. Set before torch is first imported, so
# that tests without torch need not import it; subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests import scheduling
from tests.scheduling import (
    pytest_addoption as pytest_addoption,
    pytest_configure as pytest_configure,
    pytest_report_header as pytest_report_header,
)

# Hypothesis also draws the constants of every local module loaded so far, which depends on the tests that ran before
# in this worker: without them, a test draws the same examples alone, in the whole suite and on any machine.
providers._get_local_constants = lambda: providers._local_constants

# The same examples in every run, so that a red test is red for everyone. `HYPOTHESIS_PROFILE=thorough` goes hunting.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=12)
settings.register_profile("thorough", derandomize=False, deadline=None, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Files whose tests start browsers, compilers, other programs or several processes: `make test-system` runs them, and
# `make test` everything else. A folder means all its files.
SYSTEM = (
    "batch/test_kills.py",
    "benchmarks",
    "explore",
    "inspection/test_trained_models.py",
    "interop/test_memory.py",
    "interop/test_onnx.py",
    "interop/test_pairs.py",
    "lab/test_cells.py",
    "lab/test_grid.py",
    "lab/test_workers.py",
    "nn/test_compile.py",
    "new",
    "test_stops.py",
    "test_wheel.py",
    "training/test_context_parallel.py",
    "training/test_context_runs.py",
    "training/test_parallel.py",
    "training/test_parallel_commands.py",
    "training/test_resume.py",
    "training/test_shapes.py",
)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of `SYSTEM`, leave out four fifths of the rotating groups, and begin with what takes longest."""
    paths = {HERE / name for name in SYSTEM}
    for item in items:
        if paths & {item.path, *item.path.parents}:
            item.add_marker("system")
    scheduling.rotate(config, items)
    scheduling.order(items)


gc.disable()  # during collection, which makes millions of objects and no garbage


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same weights in every run, whatever ran before; torch is not imported for it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _unplugged() -> Iterator[None]:
    """Nobody pulls the plug here, so nothing waits for the disk; what is no open file is still an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a worker: a second one cannot be started beside it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `dev-all` (playwright)")
    if CHROMIUM is None:
        pytest.skip("the browser tests need Chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
