"""Snapshots: weights kept on the way for `explore`. They change nothing that is trained."""

from pathlib import Path

import pytest
import torch

from anyformer.recipe import Train
from anyformer.runs.run import load, remove, snapshots
from anyformer.training.loop import fit
from anyformer.training.saving import AUTO_COUNT, limit_note, snapshot_steps
from tests.training.small import assert_same_run, make, pairs, run, said, settings, stop_at


def steps_in(out: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in snapshots(out)]


@pytest.mark.parametrize("steps", [1, 2, 12, 1500, 10**6])
def test_steps_are_dense_early_and_end_before_the_last(steps: int) -> None:
    found = sorted(snapshot_steps(settings(steps=steps, snapshots="auto"), 1000))
    assert found[0] == 0
    assert found[-1] < steps
    assert len(found) == min(AUTO_COUNT, len(found))
    gaps = [b - a for a, b in zip(found, [*found[1:], steps], strict=True)]
    if steps >= 1500:
        assert len(found) == AUTO_COUNT
        assert gaps == sorted(gaps)


def test_their_number_is_limited_by_their_size_unless_it_is_set() -> None:
    spec, fitting = settings(steps=1000, snapshots="auto", snapshot_mib=8), 2 * 2**20  # weights of 8 MiB
    assert len(snapshot_steps(spec, fitting // 3)) == 3
    assert snapshot_steps(spec, fitting + 1) == frozenset()
    assert len(snapshot_steps(settings(steps=1000, snapshots=5, snapshot_mib=8), fitting + 1)) == 5
    assert snapshot_steps(settings(steps=1000, snapshots=0), 1) == frozenset()
    assert limit_note(spec, fitting // AUTO_COUNT) == ""
    assert limit_note(spec, fitting // 3).startswith("3 snapshots for `explore` instead of 12: each takes 3 MiB")
    assert limit_note(spec, fitting + 1).startswith("0 snapshots")
    assert limit_note(settings(snapshots=5, snapshot_mib=0), fitting) == ""


def test_training_prints_that_there_are_fewer(tmp_path: Path) -> None:
    job = make(pairs(steps=2, valid=None, snapshots="auto", snapshot_mib=0), tmp_path / "run")
    fit(job)
    assert "0 snapshots for `explore` instead of 12" in " ".join(said(job.console).split())
    assert steps_in(tmp_path / "run") == []


def test_together_they_take_what_the_limit_allows(tmp_path: Path) -> None:
    """A folder has little beside the weights, which are all in fp32."""
    recipe = pairs(steps=40, valid=None, snapshots="auto")
    job = make(recipe, tmp_path / "run")
    fit(job)
    files = [path / "model.safetensors" for path in snapshots(tmp_path / "run")]
    for path in files:
        assert 4 * job.model.num_parameters() <= path.stat().st_size < 4 * job.model.num_parameters() + 8192


@pytest.mark.parametrize("ema", [None, 0.8])
def test_training_gives_the_same_bits_with_and_without(tmp_path: Path, ema: float | None) -> None:
    recipe = pairs(steps=12, evaluate_every=5, ema=ema, snapshots="auto")
    off = recipe.model_copy(update={"train": recipe.train.model_copy(update={"snapshots": 0})})
    run(recipe, tmp_path / "with")
    run(off, tmp_path / "without")
    assert_same_run(tmp_path / "with", tmp_path / "without")
    assert steps_in(tmp_path / "without") == []
    assert steps_in(tmp_path / "with") == sorted(snapshot_steps(recipe.train, 1000))


@pytest.mark.parametrize("ema", [None, 0.8])
def test_a_snapshot_is_the_run_at_its_step(tmp_path: Path, ema: float | None) -> None:
    """A run folder that loads by itself, with the weights that are evaluated: the moving average where there is one."""
    recipe = pairs(steps=5, snapshots=4, save_every=1, keep=5, valid=None, ema=ema)
    fit(make(recipe, tmp_path / "run"))
    for path in snapshots(tmp_path / "run")[1:]:
        kept, whole = load(path), load(tmp_path / "run" / "state" / path.name)
        assert not (path / "state.safetensors").exists()
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(kept.model.state_dict()[name], weight)


def test_a_resumed_training_has_those_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """Snapshots of steps that were lost are written again."""
    recipe = pairs(steps=12, save_every=4, snapshots="auto")
    fit(make(recipe, tmp_path / "whole"))
    out = tmp_path / "killed"
    assert stop_at(recipe, out, 7)
    assert steps_in(out) == [step for step in steps_in(tmp_path / "whole") if step < 7]
    remove(out / "state" / "step-000000007")  # as if it had been killed: it resumes at step 4
    fit(make(recipe, out, resume=True))
    assert steps_in(out) == steps_in(tmp_path / "whole")


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    job = make(pairs(steps=4, valid=None, snapshots="auto"), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(Exception, match="state/step-000000004"):  # the checkpoint at the end, which is needed
            fit(job)
    assert "no snapshot at step 0" in said(job.console)
    assert steps_in(tmp_path / "run") == []


def test_the_setting() -> None:
    assert Train.model_fields["snapshots"].default == "auto"
