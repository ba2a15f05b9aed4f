"""Tests on a GPU (`make test-gpu`): skipped where there is none. What they measure is told at the end, and written to
`$OUT/gpu.json` where OUT names a folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

MEASURED: list[dict[str, Any]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # compilers warn about themselves
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps numbers for the summary."""

    def keep(**numbers: Any) -> None:
        MEASURED.append({"test": request.node.name, **numbers})

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not MEASURED:
        return
    terminalreporter.section("measured")
    for row in MEASURED:
        shown = (
            f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in row.items() if name != "test"
        )
        terminalreporter.write_line(f"{row['test']}: {', '.join(shown)}")
    if out := os.environ.get("OUT"):
        Path(out, "gpu.json").write_text(json.dumps(MEASURED, indent=1), encoding="utf-8")
