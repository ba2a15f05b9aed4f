"""Restarts by torchrun: from the last checkpoint, with the same bits, and not after wrong input."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config import io
from anyformer.runs.processes import final_failure, record_failure
from anyformer.runs.run import checkpoints
from anyformer.training.parallel import _own_store
from tests.torture.restarts import ROOT, check
from tests.training.small import pairs


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Attempts":
    return Attempts(tmp_path, monkeypatch)


class Attempts:
    """The environment that torchrun gives to the processes of each attempt."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.set = folder, monkeypatch.setenv

    def begin(self, number: int, rank: int = 0) -> Path:
        file = self.folder / "logs" / f"attempt_{number}" / str(rank) / "error.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        self.set("TORCHELASTIC_RESTART_COUNT", str(number))
        self.set("TORCHELASTIC_ERROR_FILE", str(file))
        return file


def test_a_final_failure_is_known_to_all_later_attempts(attempt: Attempts) -> None:
    file = attempt.begin(0, rank=1)
    record_failure("wrong input", exit_code=2)
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "wrong input"
    assert int(message["extraInfo"]["timestamp"]) > 0  # torchrun requires it
    assert final_failure() is None
    attempt.begin(1)
    assert final_failure() == ("wrong input", 2)
    attempt.begin(2)
    assert final_failure() is None  # each attempt passes it on


def test_another_failure_is_tried_again(attempt: Attempts) -> None:
    attempt.begin(0)
    record_failure("lost the connection")
    attempt.begin(1)
    assert final_failure() is None


@pytest.mark.parametrize("content", ["", "[]", '{"message": "text"}', '{"message": {"message": "x"}}'])
def test_files_of_other_programs_are_passed_over(attempt: Attempts, content: str) -> None:
    attempt.begin(0).write_text(content)
    attempt.begin(1)
    assert final_failure() is None


def test_wrong_input_is_reported_again_without_training(attempt: Attempts, tmp_path: Path) -> None:
    wrong = ["train", "sort", "train.stepz=3", "--out", str(tmp_path / "run")]
    attempt.begin(0)
    first = CliRunner().invoke(app, wrong)
    for number in (1, 2):
        attempt.begin(number)
        # even a command that would succeed is not run: torchrun repeats the same one
        again = CliRunner().invoke(app, ["train", "sort", "--out", str(tmp_path / "run")])
        assert again.exit_code == first.exit_code == 2
        assert again.stderr == f"restart {number}: not tried again, as it would fail again: {first.stderr}"
    assert not (tmp_path / "run").exists()


def test_each_attempt_has_its_own_part_of_a_store() -> None:
    """torchrun keeps the keys of ended processes; an attempt may have another number of processes."""
    store, kept = dist.HashStore(), list[str]()
    for size in (3, 3, 2, 4):
        with ThreadPoolExecutor(size) as pool:
            parts = [*pool.map(lambda rank: _own_store(store, rank, size), range(size))]  # noqa: B023  called at once
        parts[0].set("address", str(len(kept)))
        kept.append(parts[-1].get("address").decode())
    assert kept == ["0", "1", "2", "3"]


@pytest.mark.parametrize("words", [["--resume"], ["--resume", "auto"]])
def test_resume_auto_starts_and_continues(tmp_path: Path, words: list[str]) -> None:
    out = tmp_path / "run"
    io.save(pairs(steps=2, valid=None), tmp_path / "small.toml")
    for steps in (2, 3):
        done = CliRunner().invoke(
            app, ["train", str(tmp_path / "small.toml"), *words, f"train.steps={steps}", "--out", str(out)]
        )
        assert done.exit_code == 0, done.output
    assert [path.name[-1] for path in checkpoints(out)] == ["2", "3"]


@pytest.mark.system
def test_killed_and_stopped_ranks_change_nothing(tmp_path: Path) -> None:
    assert len(list(check(tmp_path, kills=2, hangs=1, seed=1, changes=["parallel.shard=full"]))) == 3
    log = (tmp_path / "disturbed.log").read_text()
    assert "no progress for 20 s (parallel.timeout) at " in log
    assert "resuming from step " in log


@pytest.mark.system
def test_wrong_input_is_not_tried_again(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "anyformer", "train", "sort"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "train.stepz=3", "--resume", "auto"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    fault = "train.stepz: unknown key; did you mean 'steps'?\n"
    again = [f"restart {number}: not tried again, as it would fail again: {fault}" for number in (1, 2)]
    assert f"\n{fault}" in f"\n{done.stderr}"
    # torchrun may stop the rank that prints, once the other has failed: not in each restart
    assert any(f"\n{line}" in done.stderr for line in again), done.stderr
