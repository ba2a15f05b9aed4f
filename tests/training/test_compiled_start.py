"""A compiled training starts from stored code, and compiles damaged code again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anyformer.data.datasets.storage import cache_folder
from anyformer.training.compile_cache import DIGESTS, SETTING, TRITON_SETTING

pytestmark = pytest.mark.system

SMALL = [
    "model.width=16",
    "model.decoder.depth=1",
    "model.decoder.blocks.*.mixer.heads=2",
    "batches.rows=2",
    "batches.length=8",
]
# in bf16, gradients of norms are custom functions
TRAIN = [
    "train.precision=bf16",
    "train.steps=1",
    "train.log_every=1",
    "train.snapshots=0",
    "train.compile=on",
    "train.evaluate_every=none",
]


def train(home: Path, out: Path) -> tuple[float, str]:
    """Return the first loss, and what was printed."""
    environment = {name: value for name, value in os.environ.items() if name not in (SETTING, TRITON_SETTING)}
    environment |= {"XDG_CACHE_HOME": str(home), "ANYFORMER_DATA": str(cache_folder())}
    command = [sys.executable, "-m", "anyformer", "train", "shakespeare", *SMALL, *TRAIN, "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr  # in finalizers of torch's locks
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return next(row["loss"] for row in rows if "loss" in row), done.stdout + done.stderr


def files(home: Path) -> dict[str, int]:
    """Return the stored files, and when each was written."""
    (folder,) = (path for path in (home / "anyformer" / "compiled").iterdir() if path.is_dir())
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS}


def test_stored_code(tmp_path: Path) -> None:
    home = tmp_path / "cache"
    loss, printed = train(home, tmp_path / "cold")
    assert "compiled again" not in printed
    libraries = {name: time for name, time in files(home).items() if name.endswith(".so")}
    assert libraries
    assert any("aotautograd" in Path(name).parts for name in files(home))  # the derived gradients, too
    again, printed = train(home, tmp_path / "warm")
    assert again == loss
    assert {name: files(home)[name] for name in libraries} == libraries  # read, not written
    damaged = Path(next(iter(libraries)))
    damaged.write_bytes(damaged.read_bytes()[:-8])
    again, printed = train(home, tmp_path / "damaged")
    assert again == loss
    assert "compiled again" in printed
    assert not {name: files(home)[name] for name in libraries if name in files(home)}.items() & libraries.items()
