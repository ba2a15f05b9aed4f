"""Which cases run and in which order: a fifth of each rotating group, and the files that take longest first.

The cases of a group are alike: one law over many families, or slow tests of one machinery. `--rotate` chooses a fifth
of the slow ones by a hash of the commit and the case, so that each change runs others; `make thorough` runs all.

`tests/durations.json` holds the mean seconds of a case of each test; `--store-durations` measures those that run. A
test of many cases that take long together is a group of its own.
"""

import hashlib
import json
import os
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.planted_faults import FAULTS

DURATIONS = Path(__file__).with_name("durations.json")
SHARE = 5  # `--rotate` runs a case in so many
LONG = 1.0  # seconds of all cases of a test above which it rotates
QUICK = 0.2  # seconds of a case below which it runs although its group rotates
# Files that run all their cases: those that a planted fault names, and those whose cases use what earlier ones made.
WHOLE = {f"tests/{name}" for fault in FAULTS for name in fault.tests.split() if name.endswith(".py")}
WHOLE |= {"tests/docs_site/test_your_data.py"}
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
        "training/test_tensor_parallel.py",
        "training/test_tensor_runs.py",
    ),
    "kills": (
        "batch/test_kills.py",
        "lab/test_cells.py",
        "lab/test_workers.py",
        "serve/http/test_process.py",
        "serve/test_ray_serve.py",
        "test_stops.py",
        "training/test_resume.py",
    ),
    "compilers": (
        "attention/test_flex.py",
        "decoding/test_self_draft.py::test_a_compiled_step_is_compiled_once",
        "kernels/test_linear_recurrence.py::test_compiled_under_a_default_device",
        "nn/test_captured_experts.py",
        "nn/test_compile.py",
        "nn/test_experts.py::test_compiled_in_one_graph",
        "nn/test_pooling.py::test_it_compiles_without_breaks",
        "training/test_compiled_start.py",
        "training/test_compiler.py",
        "training/test_shapes.py",
        "transforms/test_quantise.py::test_it_compiles_without_a_break",
        "transforms/test_substitute.py::test_compiled_half_precision_training",
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
    "parts of users": (
        "extension/test_check.py::test_the_parts_of_a_file_are_checked",
        "extension/test_commands.py",
        "extension/test_data_parts.py",
        "extension/test_examples.py",
        "extension/test_extension.py",
        "extension/test_options.py",
        "extension/test_task.py",
        "extension/test_training.py",
    ),
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
    "trained models": (
        "inspection/test_trained_models.py",
        "tasks/test_images_and_texts.py",
        "tasks/test_span.py::test_a_small_model_learns_to_answer",
        "test_doctor.py::test_training_follows_the_report",
    ),
    "wheels": ("test_wheel.py",),
}
SEED = "ROTATION"  # the environment variable that chooses the cases; the controller's workers inherit it


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("anyformer")
    group.addoption("--rotate", action="store_true", help=f"run one in {SHARE} cases of tests marked `rotating`")
    group.addoption("--store-durations", action="store_true", help=f"store mean seconds by test in {DURATIONS.name}")


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
    families, tests, seconds = defaultdict[str, list[str]](list), Counter(map(test_of, items)), stored()
    for item in items:
        test = test_of(item)
        mean = seconds.get(test, 0.0)
        if file_of(test) in WHOLE:
            continue
        if group := group_of(item):
            families[group] += [item.nodeid] if mean >= QUICK else []
        elif tests[test] >= SHARE and tests[test] * mean >= LONG:
            families[test].append(item.nodeid)
    out = set[str]()
    for ids in families.values():
        ids.sort(key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
        out.update(ids[-(-len(ids) // SHARE) :])
    return out


def test_of(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def stored() -> dict[str, float]:
    """Return the mean seconds of a case of each test."""
    return json.loads(DURATIONS.read_text(encoding="utf-8"))


def group_of(item: pytest.Item) -> str | None:
    """Return the named group with which a test rotates."""
    test = test_of(item)
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
    seconds, files = stored(), Counter[str]()
    for item in items:
        files[file_of(item.nodeid)] += seconds.get(test_of(item), 0.0)
    items.sort(key=lambda item: -files[file_of(item.nodeid)])


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


class Durations:
    """Mean seconds of a case by test, from the reports of all workers."""

    def __init__(self, config: pytest.Config):
        self.config, self.seconds, self.cases = config, Counter[str](), defaultdict[str, set[str]](set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.split("[")[0]
        self.seconds[test] += report.duration
        self.cases[test].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self.config.getoption("store_durations") and not hasattr(self.config, "workerinput"):
            means = {test: round(used / len(self.cases[test]), 2) for test, used in self.seconds.items()}
            root = self.config.rootpath
            rows = {test: mean for test, mean in sorted((stored() | means).items()) if (root / file_of(test)).exists()}
            rows = {test: mean for test, mean in rows.items() if mean >= 0.05}
            DURATIONS.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")
