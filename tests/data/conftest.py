"""A working directory for tests of files of rows."""

from pathlib import Path

import pytest


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Resolve relative paths in an empty folder, whatever the environment of the machine."""
    monkeypatch.delenv("ANYFORMER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
