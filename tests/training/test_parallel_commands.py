"""Commands run by two processes: errors are told once, and a signal to one ends all."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from anyformer.config import io
from anyformer.runs import processes
from anyformer.runs.run import checkpoints
from anyformer.training.train import train
from tests.training.small import pairs, quiet
from tests.training.two_processes import SMOOTH, assert_alike, command, ends, spawn, wait

ROOT = Path(__file__).parents[2]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    io.save(pairs(dropout=0.0, valid=None, optimizer=SMOOTH, steps=10_000), tmp_path / "small.toml")
    return tmp_path / "small.toml"


def test_wrong_input_is_told_once(written: Path, tmp_path: Path) -> None:
    codes, out, complaints = ends(spawn(tmp_path, command, "train", written, "train.stepz=3"))
    assert codes == [2, 2]
    assert out == ["", ""]
    assert complaints == ["train.stepz: unknown key; did you mean 'steps'?\n", ""]


def train_in_own_folder(folder: Path, recipe: Path, seconds: float) -> None:
    """Train with a relative --out, in a working folder of this process's own."""
    own = folder / os.environ["RANK"]
    own.mkdir()
    os.chdir(own)
    with mock.patch.object(processes, "VISIBLE_SECONDS", seconds):
        command("train", recipe, "train.steps=2", "--out", "run")


def test_a_folder_that_not_all_processes_share_is_refused_at_the_start(written: Path, tmp_path: Path) -> None:
    codes, _, complaints = ends(spawn(tmp_path, train_in_own_folder, tmp_path, written, 0.0))
    assert codes == [2, 2]
    assert complaints[0].startswith(f"{tmp_path}/1/run: not found on {socket.gethostname()} (process ")
    assert complaints[0].endswith(": --out must be a folder that all nodes share\n")
    assert complaints[0].count("\n") == 1
    assert complaints[1] == ""
    assert [*tmp_path.glob("?/run")] == []


def test_a_signal_ends_all(written: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = spawn(tmp_path, command, "train", written, "--out", out, "parallel.shard=full")
    wait(out / "metrics.jsonl", ranks[1].process.is_alive)
    ranks[1].process.terminate()
    codes, _, complaints = ends(ranks)
    assert codes == [3, 3], "\n".join(complaints)
    assert complaints[0].startswith("interrupted at step ")
    assert complaints[0].count("\n") == 1
    assert complaints[1] == ""
    assert len(checkpoints(out)) == 1


def test_torchrun(written: Path, tmp_path: Path) -> None:
    """It is told to stop, passes that on, and one process goes on where two were."""
    out = tmp_path / "run"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "anyformer", "train"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *words, written, "--out", out], cwd=ROOT, **pipes) as process:
        wait(out / "metrics.jsonl", lambda: process.poll() is None)
        process.terminate()
        _, complaints = process.communicate(timeout=240)
    step = int(checkpoints(out)[-1].name.removeprefix("step-"))
    assert complaints.count(f"interrupted at step {step} and saved: continue with --resume") == 1, complaints
    changes = [f"train.steps={step + 2}"]
    with mock.patch("anyformer.training.train.draw_curve", return_value=None):
        train(str(written), out, changes, resume=True, console=quiet())
        train(str(written), tmp_path / "straight", changes, console=quiet())
    assert_alike(tmp_path / "straight", out)
