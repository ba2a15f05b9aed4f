"""Which cases run and in which order: a fifth of each rotating group, and the files that take longest first.

The cases of a group are alike: one law over many families, or slow tests of one machinery. `--rotate` chooses a fifth
by a hash of the commit and the case, so that each change runs others; `make thorough` runs all.

`tests/durations.json` holds the seconds of each file; `--store-durations` measures those that run.
"""

import hashlib
import json
import os
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
SHARE = 5  # `--rotate` runs a case in so many
# Files, folders and tests of each group. A test of none of them may carry the mark `rotating`: its cases are a group.
ROTATING = {
    "ranks": (
        "training/test_context_parallel.py",
        "training/test_context_runs.py",
        "training/test_layouts.py",
        "training/test_parallel.py",
        "training/test_parallel_commands.py",
        "training/test_parallel_optimisers.py",
        "training/test_restarts.py",
    ),
    "kills": (
        "batch/test_kills.py",
        "lab/test_cells.py",
        "lab/test_workers.py",
        "serve/http/test_process.py",
        "training/test_resume.py::test_a_signal_changes_nothing",
    ),
    "compilers": (
        "attention/test_flex.py",
        "nn/test_compile.py",
        "training/test_compiled_start.py",
        "training/test_compiler.py",
        "training/test_shapes.py",
    ),
    "pages": (
        "docs_site/test_browser.py",
        "explore/test_access.py",
        "explore/test_axe.py",
        "explore/test_browser.py",
        "explore/test_causes_page.py",
        "explore/test_encoders.py",
        "explore/test_film_page.py",
        "explore/test_hover.py",
        "explore/test_lesson_files.py",
        "explore/test_pictures.py",
    ),
    "documents": ("docs_site/test_pages_run.py", "docs_site/test_tutorials.py"),
    "public models": (
        "interop/test_decoders.py",
        "interop/test_encoders.py",
        "interop/test_families.py",
        "interop/test_grid.py",
        "interop/test_heads.py",
        "interop/test_onnx.py",
        "interop/test_pairs.py",
        "interop/test_published.py",
    ),
    "plans": ("inspection/test_memory.py", "training/test_plan.py"),
    "tasks": ("new/test_new.py", "tasks/test_strategies.py"),
}
SEED = "ROTATION"  # the environment variable that chooses the cases; the controller's workers inherit it


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("anyformer")
    group.addoption("--rotate", action="store_true", help=f"run one in {SHARE} cases of tests marked `rotating`")
    group.addoption("--store-durations", action="store_true", help=f"store seconds by file in {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))
    if config.getoption("rotate") and SEED not in os.environ:
        git = ("git", "-C", str(DURATIONS.parent), "rev-parse", "HEAD")
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        os.environ[SEED] = done.stdout.strip()[:12] or "0"


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not config.getoption("rotate"):
        return []
    return [f"rotation: one in {SHARE} cases, chosen by {SEED}={os.environ[SEED]}"]


def left_out(items: list[pytest.Item], seed: str) -> set[str]:
    """Return the ids of rotating cases that are left out: of each group four fifths, and never all."""
    families = defaultdict[str, list[str]](list)
    for item in items:
        if group := group_of(item):
            families[group].append(item.nodeid)
    out = set[str]()
    for ids in families.values():
        ids.sort(key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
        out.update(ids[-(-len(ids) // SHARE) :])
    return out


def group_of(item: pytest.Item) -> str | None:
    """Return the group with which a test rotates; None: it always runs."""
    test = item.nodeid.split("[")[0]
    if item.get_closest_marker("rotating"):
        return test
    name = test.removeprefix("tests/")
    return next((key for key, paths in ROTATING.items() if name.startswith(paths)), None)


def rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("rotate"):
        out = left_out(items, os.environ[SEED])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]


def order(items: list[pytest.Item]) -> None:
    """Sort by file: a worker that becomes free takes the next one, so that the last ones are short."""
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 0.0))


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


class Durations:
    """Seconds by file, from the reports of all workers."""

    def __init__(self, config: pytest.Config):
        self.config, self.seconds = config, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self.config.getoption("store_durations") and not hasattr(self.config, "workerinput"):
            known = json.loads(DURATIONS.read_text(encoding="utf-8"))
            known |= {name: round(used, 1) for name, used in self.seconds.items()}
            root = self.config.rootpath
            rows = {name: used for name, used in sorted(known.items()) if used >= 0.1 and (root / name).exists()}
            DURATIONS.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")
