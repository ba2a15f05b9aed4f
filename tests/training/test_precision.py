"""What training multiplies in."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer.config import ConfigError, LoRA
from anyformer.recipe import Recipe
from anyformer.training import loop, prepare
from anyformer.training.loop import fit
from anyformer.transforms.fp8 import Float8Fused, Float8Linear
from tests.training.small import make, metrics, model, pairs, quiet, run, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have units for fp8")
def test_fp8_is_refused_where_nothing_multiplies_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.precision = 'fp8': needs a GPU .* this is the CPU: 'auto' takes"):
        make(pairs(precision="fp8"), tmp_path / "run")
    assert not list((tmp_path / "run").glob("step*"))


def test_a_run_in_fp8_goes_on_and_is_a_run_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reference of its products."""
    monkeypatch.setattr(prepare, "able", lambda device: True)
    monkeypatch.setattr(loop, "_autocast", lambda job: nullcontext())  # not every CPU has bf16

    def narrow(steps: int) -> Recipe:
        return wide(steps, precision="fp8", save_every=2)

    job = make(narrow(2), tmp_path / "run")
    fit(job)
    assert any(isinstance(module, Float8Linear | Float8Fused) for module in job.model.modules())
    again = run(narrow(4), tmp_path / "run", resume=True)
    assert [row["step"] for row in metrics(tmp_path / "run") if row.get("skipped")] == []
    assert not any(isinstance(module, Float8Linear | Float8Fused) for module in again.model.modules())


@pytest.fixture
def _with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "able", lambda device: True)


@pytest.mark.usefixtures("_with_fp8")
def test_fp8_is_refused_where_no_layer_can_be_converted(tmp_path: Path) -> None:
    """The reasons are the sizes, or an adapter on each of them; no folder remains."""
    with pytest.raises(ConfigError, match=r"train\.precision = 'fp8': no linear layer .* 4 with a size .* set 'bf16'$"):
        make(pairs(precision="fp8"), tmp_path / "narrow")
    run(wide(1), tmp_path / "first")
    with pytest.raises(
        ConfigError, match=r"no linear layer .* there are 4 with an adapter; .* model\.adapter\.targets$"
    ):
        make(adapted(["*.blocks"], tmp_path / "first"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "narrow").exists()


@pytest.mark.usefixtures("_with_fp8")
def test_fp8_names_the_layers_that_stay(tmp_path: Path) -> None:
    run(wide(1), tmp_path / "first")
    console = quiet()
    job = make(adapted(["*.mixer"], tmp_path / "first"), tmp_path / "run", console=console)
    assert sum(isinstance(module, Float8Linear | Float8Fused) for module in job.model.modules()) == 2
    assert "fp8: 2 linear layers of the blocks; in bf16 remain 2 with an adapter\n" in said(console)


def wide(steps: int, **train: Any) -> Recipe:
    return pairs(steps=steps, **train).model_copy(update={"model": model(width=16)})


def adapted(targets: list[str], first: Path) -> Recipe:
    recipe = wide(2, precision="fp8", init_from=str(first))
    change = {"adapter": LoRA(rank=2, targets=tuple(targets))}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=change)})
