"""The end of a run: the best checkpoint, averages, and what is left when the disk is full."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from anyformer.config import ConfigError
from anyformer.nn.model import Transformer
from anyformer.runs.run import load
from anyformer.training.checkpoint import checkpoint_path, checkpoints, write_state
from anyformer.training.loop import fit
from anyformer.training.saving import save
from anyformer.training.step import update_ema
from anyformer.training.train import finish
from tests.training.jobs import assert_equal, parameters, set_losses
from tests.training.small import PACKED, PADDED, Watched, make, model, pairs, run

# -- the beginning and the end ----------------------------------------------------------------------------------------


def test_patience(tmp_path: Path) -> None:
    job = make(pairs(steps=20, evaluate_every=2, patience=2, keep=1), tmp_path / "run")
    set_losses(job, [5.0, 3.0, 4.0, 2.5, 2.6, 2.7, 0.0])
    fit(job)
    assert (job.state.step, job.state.best_step, job.state.best) == (12, 8, 2.5)
    finish(job)
    best = load_file(checkpoints(tmp_path / "run")[0] / "model.safetensors")
    assert_equal(load_file(tmp_path / "run" / "model.safetensors"), best)


@pytest.mark.parametrize("ema", [None, 0.7])
def test_the_best_is_what_was_evaluated(tmp_path: Path, ema: float | None) -> None:
    """With a moving average: the average of then, neither the weights of then nor the average of now."""
    job = make(pairs(steps=6, evaluate_every=2, ema=ema), tmp_path / "run")
    seen: list[dict[str, Tensor]] = []
    evaluate, losses = job.task.evaluate, iter([2.0, 1.0, 3.0])

    def told(net: Transformer, *rest: Any) -> Any:
        seen.append({name: p.detach().clone() for name, p in net.named_parameters()})
        found = evaluate(net, *rest)
        found.values["loss"] = next(losses)
        return found

    job.task.evaluate = told
    fit(job)
    made = finish(job)
    assert_equal({name: p.detach() for name, p in made.model.named_parameters()}, seen[1])


def test_a_moving_average(tmp_path: Path) -> None:
    job = make(pairs(steps=6, ema=0.7, save_every=1, keep=6), tmp_path / "run")
    fit(job)
    states = [load_file(path / "model.safetensors") for path in checkpoints(tmp_path / "run")]
    for name, x in job.state.ema.items():
        wanted = states[0][name]
        for state in states[1:]:
            wanted = 0.7 * wanted + 0.3 * state[name]
        torch.testing.assert_close(x, wanted)


def test_an_average_moves_by_a_share_that_nobody_has_read(tmp_path: Path) -> None:
    job = make(pairs(), tmp_path / "run")
    update_ema(job, 0.3)
    with torch.no_grad():
        for p in job.model.parameters():
            p.add_(torch.randn_like(p))
    before = {name: x.clone() for name, x in job.state.ema.items()}
    update_ema(job, torch.tensor(0.0))
    assert all(torch.equal(x, before[name]) for name, x in job.state.ema.items())
    update_ema(job, torch.tensor(0.3))
    found, job.state.ema = job.state.ema, before
    update_ema(job, 0.3)
    for name, x in found.items():
        torch.testing.assert_close(x, job.state.ema[name])


@pytest.mark.parametrize("ema", [None, 0.5])
def test_the_last_checkpoints_are_averaged(tmp_path: Path, ema: float | None) -> None:
    job = make(pairs(steps=10, save_every=2, average=3, keep=1, ema=ema), tmp_path / "run")
    fit(job)
    paths = checkpoints(tmp_path / "run")[-3:]
    assert [path.name[-2:] for path in paths] == ["06", "08", "10"]
    file, prefix = ("model.safetensors", "") if ema is None else ("state.safetensors", "ema.")
    states = [load_file(path / file) for path in paths]
    made = finish(job)
    for name, p in made.model.named_parameters():
        torch.testing.assert_close(p.detach(), sum(state[prefix + name] for state in states) / 3)


def test_init_from(tmp_path: Path) -> None:
    first = run(pairs(), tmp_path / "first")
    job = make(pairs(dropout=0.3, init_from=str(tmp_path / "first")), tmp_path / "second")
    assert_equal(parameters(job), {name: p.detach() for name, p in first.model.named_parameters()})
    other = pairs(init_from=str(tmp_path / "first"))
    wider = other.model_copy(update={"model": model(width=16)})
    with pytest.raises(ConfigError, match=r"train\.init_from = .*its model differs: width"):
        make(wider, tmp_path / "third")


def test_a_resumed_run_is_not_begun_from_another_again(tmp_path: Path) -> None:
    run(pairs(), tmp_path / "first")
    spec = pairs(init_from=str(tmp_path / "first"), save_every=6)
    run(spec, tmp_path / "second")
    before = (tmp_path / "second" / "model.safetensors").read_bytes()
    run(spec, tmp_path / "second", resume=True)
    assert (tmp_path / "second" / "model.safetensors").read_bytes() == before


# -- the disk ---------------------------------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_after(write: Callable[..., Any]) -> Callable[..., None]:
    def half(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        full()

    return half


@pytest.fixture(
    params=[
        "safetensors.torch.save_file",
        "anyformer.training.saving.write_state",
        "anyformer.runs.atomic_folder._sync",
    ]
)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, spec = tmp_path / "run", pairs(steps=12, save_every=4, keep=1, valid=None)
    job = make(spec, out)

    def fill_the_disk() -> None:
        job.writer.wait()  # for the checkpoint of step 4
        module, _, name = place.rpartition(".")
        import importlib

        monkeypatch.setattr(place, full_after(getattr(importlib.import_module(module), name)))

    job.loader = Watched(job.loader, 6, fill_the_disk)
    with pytest.raises(ConfigError) as caught:
        fit(job)
    assert len(caught.value.faults) == 1
    assert "step-000000008: cannot be written: No space left on device" in str(caught.value)
    monkeypatch.undo()
    assert [path.name for path in (out / "state").iterdir()] == ["step-000000004"]
    assert make(spec, out, resume=True).state.step == 4


def test_a_full_disk_at_the_end_leaves_no_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, spec = tmp_path / "run", pairs(steps=4, valid=None)
    job = make(spec, out)
    fit(job)
    monkeypatch.setattr("safetensors.torch.save_file", full_after(lambda x, path: Path(path).write_bytes(b"half")))
    with pytest.raises(ConfigError, match="No space left on device"):
        finish(job)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="training has not finished"):
        assert load(out).folder == checkpoints(out)[-1]  # not the half of it that is there
    run(spec, out, resume=True)
    assert load(out).folder == out


def test_a_full_disk_for_metrics_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(pairs(valid=None), tmp_path / "run")
    monkeypatch.setattr("anyformer.training.log.json.dumps", full)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be written: No space left on device"):
        fit(job)


# -- asynchronous saves -----------------------------------------------------------------------------------------------


class SlowDisk:
    """Writes of checkpoints that last until they are released, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, self.begun, self.running, self.most = threading.Event(), 0, 0, 0
        monkeypatch.setattr("anyformer.training.saving.write_state", self.write)

    def write(self, *args: Any) -> None:
        self.begun, self.running = self.begun + 1, self.running + 1
        self.most = max(self.most, self.running)
        assert self.released.wait(timeout=60)
        write_state(*args)
        self.running -= 1


def test_steps_continue_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint holds the step at which it was begun; the next save waits for it."""
    out, disk = tmp_path / "run", SlowDisk(monkeypatch)
    spec = pairs(steps=8, save_every=3, keep=3, valid=None, ema=0.9)
    job = make(spec, out)

    def release() -> None:  # at step 5
        while disk.begun == 0:  # the thread that writes may not have run yet
            time.sleep(0.001)
        assert disk.begun == 1
        assert checkpoints(out) == []
        disk.released.set()

    job.loader = Watched(job.loader, 5, release)
    fit(job)
    assert (disk.begun, disk.most) == (3, 1)
    monkeypatch.undo()
    run(spec, tmp_path / "straight")
    for step in (3, 6, 8):
        for file in ("model.safetensors", "state.safetensors"):
            one, other = (checkpoint_path(folder, step) / file for folder in (out, tmp_path / "straight"))
            assert one.read_bytes() == other.read_bytes()


def test_an_error_of_the_writer_ends_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(pairs(steps=100, save_every=2, valid=None), tmp_path / "run")
    monkeypatch.setattr("anyformer.training.saving.write_state", full)

    def join() -> None:
        while not job.writer.failed:
            time.sleep(0.001)

    job.loader = Watched(job.loader, 3, join)
    with pytest.raises(ConfigError, match="step-000000002: cannot be written: No space left on device"):
        fit(job)
    assert job.state.step == 3
    assert checkpoints(tmp_path / "run") == []


def test_another_error_waits_for_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, job = SlowDisk(monkeypatch), make(pairs(steps=100, save_every=2, valid=None), tmp_path / "run")

    def fail() -> None:
        threading.Timer(0.1, disk.released.set).start()
        raise ZeroDivisionError

    job.loader = Watched(job.loader, 3, fail)
    with pytest.raises(ZeroDivisionError):
        fit(job)
    assert checkpoints(tmp_path / "run") == [checkpoint_path(tmp_path / "run", 2)]


@pytest.mark.parametrize("batches", [PADDED, PACKED])
def test_a_save_changes_nothing(tmp_path: Path, batches: Any) -> None:
    """However often it is saved and evaluated, the training is the same."""
    one = make(pairs(batches=batches, steps=6, valid=None), tmp_path / "one")
    other = make(pairs(batches=batches, steps=6, save_every=1, evaluate_every=1), tmp_path / "other")
    for job in (one, other):
        torch.manual_seed(3)
        fit(job)
        save(job)
    assert_equal(parameters(one), parameters(other))
