"""The number of CPU threads of a training step."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anyformer.recipe import Recipe
from anyformer.training.checkpoint import checkpoint_path
from anyformer.training.loop import fit
from anyformer.training.machine import ONE_THREAD_FLOPS, SETTINGS, choose_threads, threads
from anyformer.training.plan import plan
from tests.training.small import Watched, make, pairs, quiet, said


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    with threads(2):
        yield


def test_only_a_small_step_takes_one_thread(two_threads: None) -> None:
    assert choose_threads(ONE_THREAD_FLOPS - 1) == 1
    assert choose_threads(ONE_THREAD_FLOPS) == torch.get_num_threads() == 2


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_user_stays(two_threads: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    assert choose_threads(1.0) == 2


def test_threads_are_restored(two_threads: None) -> None:
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def small(steps: int) -> Recipe:
    return pairs(steps=steps, save_every=2)


def test_steps_run_with_the_chosen_threads(two_threads: None, tmp_path: Path) -> None:
    used, job = [], make(small(4), tmp_path / "run")
    assert job.threads == 1
    job.loader = Watched(job.loader, 2, lambda: used.append(torch.get_num_threads()))
    fit(job)
    assert used == [1]
    assert torch.get_num_threads() == 2


def test_a_resumed_run_has_the_same_threads(two_threads: None, tmp_path: Path) -> None:
    """The choice follows from the recipe, so a resumed run has the bits of an uninterrupted one."""
    fit(make(small(2), tmp_path / "run"))
    stored = json.loads((checkpoint_path(tmp_path / "run", 2) / "state.json").read_text())["here"]["threads"]
    console = quiet()
    job = make(small(4), tmp_path / "run", resume=True, console=console)
    assert (stored, job.threads) == (1, 1)
    assert "bits may differ" not in said(console)


def test_a_plan_is_timed_with_the_chosen_threads(
    two_threads: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used = list[int]()
    module = "anyformer.training.plan"
    monkeypatch.setattr(f"{module}._time", lambda job, batches: used.append(torch.get_num_threads()) or (1.0, 1.0))
    plan(small(2), quiet())
    assert used == [1]
    assert torch.get_num_threads() == 2
