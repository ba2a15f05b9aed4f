"""What training multiplies in."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer.config import ConfigError, LoRA
from anyformer.nn.transforms.fp8 import Float8Format
from anyformer.recipe import Recipe
from anyformer.training import machine
from anyformer.training.job import Job
from anyformer.training.loop import evaluate, fit
from tests.training.small import make, metrics, model, pairs, run


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have units for fp8")
def test_fp8_is_refused_where_nothing_multiplies_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.precision = 'fp8': needs a GPU .* this is the CPU: use 'auto'"):
        make(pairs(precision="fp8"), tmp_path / "run")
    assert not list((tmp_path / "run").glob("step*"))


def test_a_run_in_fp8_goes_on_and_is_a_run_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reference of its products."""
    monkeypatch.setattr(machine, "is_supported", lambda device: True)
    monkeypatch.setattr(Job, "autocast", lambda job: nullcontext())  # not every CPU has bf16

    def narrow(steps: int) -> Recipe:
        return wide(steps, precision="fp8", save_every=2)

    job = make(narrow(2), tmp_path / "run")
    fit(job)
    assert any(isinstance(module, Float8Format) for module in job.model.modules())
    again = run(narrow(4), tmp_path / "run", resume=True)
    assert [row["step"] for row in metrics(tmp_path / "run") if row.get("skipped")] == []
    assert not any(isinstance(module, Float8Format) for module in again.model.modules())


@pytest.fixture
def _with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_supported", lambda device: True)


@pytest.mark.usefixtures("_with_fp8")
def test_fp8_is_refused_where_no_layer_can_be_converted(tmp_path: Path) -> None:
    """The message counts the sizes that do not fit; no folder remains."""
    with pytest.raises(ConfigError, match=r"train\.precision = 'fp8': no linear layer .* 4 with a size .* set 'bf16'$"):
        make(pairs(precision="fp8"), tmp_path / "narrow")
    assert not (tmp_path / "narrow").exists()


@pytest.mark.usefixtures("_with_fp8")
@pytest.mark.parametrize("targets", [["*.blocks"], ["*.mixer"]])
def test_fp8_trains_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str]) -> None:
    """The base is multiplied in fp8, whether it has an adapter or not; only the adapters learn."""
    monkeypatch.setattr(Job, "autocast", lambda job: nullcontext())  # not every CPU has bf16
    run(wide(1), tmp_path / "first")
    job = make(adapted(targets, tmp_path / "first"), tmp_path / "run")
    before = {name: x.clone() for name, x in job.model.state_dict().items()}
    assert sum(isinstance(module, Float8Format) for module in job.model.modules()) == 4
    fit(job)
    changed = {name for name, x in job.model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {name for name in before if ".lora." in name}


def wide(steps: int, **train: Any) -> Recipe:
    return pairs(steps=steps, **train).model_copy(update={"model": model(width=16)})


def adapted(targets: list[str], first: Path) -> Recipe:
    recipe = wide(2, precision="fp8", init_from=str(first))
    change = {"adapter": LoRA(rank=2, targets=tuple(targets))}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=change)})


def test_losses_are_evaluated_in_the_precision_of_training(tmp_path: Path) -> None:
    """They are near those of fp32; texts are generated in the precision of the weights."""
    job = make(pairs(steps=1, precision="bf16"), tmp_path / "run")
    fit(job)
    assert job.valid is not None
    seen: list[bool] = []
    hook = job.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    low = evaluate(job, job.valid).values
    hook.remove()
    assert any(seen)
    job.precision = "fp32"
    exact = evaluate(job, job.valid).values
    assert low.pop("loss") == pytest.approx(exact.pop("loss"), rel=1e-2)
    assert low.pop("perplexity") == pytest.approx(exact.pop("perplexity"), rel=1e-1)
    assert low == exact
