"""Which cases run and in which order: a fifth of each rotating test, and the files that take longest first.

`tests/durations.json` holds the CPU seconds of each file; `--store-durations` measures those that run. CPU time, of the
worker and of the processes that it has waited for, does not depend on what else the machine does.
"""

import hashlib
import json
import os
import resource
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

DURATIONS = Path(__file__).parent / "durations.json"
SHARE = 5  # `--rotate` runs a case in so many
SEED = "ROTATION"  # the environment variable that chooses the cases; the controller's workers inherit it


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("anyformer")
    group.addoption("--rotate", action="store_true", help=f"run one in {SHARE} cases of tests marked `rotating`")
    group.addoption("--store-durations", action="store_true", help=f"store CPU seconds by file in {DURATIONS.name}")


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
    """Return the ids of cases of rotating tests that are left out: of each test four fifths, and never all."""
    families = defaultdict[str, list[str]](list)
    for item in items:
        if item.get_closest_marker("rotating"):
            families[item.nodeid.split("[")[0]].append(item.nodeid)
    out = set[str]()
    for ids in families.values():
        ids.sort(key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
        out.update(ids[-(-len(ids) // SHARE) :])
    return out


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


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Durations:
    """CPU seconds by file: measured in each worker, collected and stored by the controller."""

    def __init__(self, config: pytest.Config):
        self.config, self.seconds = config, Counter[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin = cpu_seconds()
        result = yield
        self.seconds[file_of(item.nodeid)] += cpu_seconds() - begin
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("seconds", {}))

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["seconds"] = dict(self.seconds)
        elif self.config.getoption("store_durations"):
            known = json.loads(DURATIONS.read_text(encoding="utf-8"))
            known |= {name: round(used, 1) for name, used in self.seconds.items()}
            root = self.config.rootpath
            rows = {name: used for name, used in sorted(known.items()) if used >= 0.1 and (root / name).exists()}
            DURATIONS.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")
