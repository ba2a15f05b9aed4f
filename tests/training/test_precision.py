"""What training multiplies in."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from anyformer.config import ConfigError
from anyformer.nn.fp8 import Float8Fused, Float8Linear
from anyformer.recipe import Recipe
from anyformer.training import loop, prepare
from anyformer.training.loop import fit
from tests.training.small import make, metrics, model, pairs, run


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have units for fp8")
def test_fp8_is_refused_where_nothing_multiplies_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.precision = 'fp8': needs a GPU .* this is the CPU: 'auto' takes"):
        make(pairs(precision="fp8"), tmp_path / "run")
    assert not list((tmp_path / "run").glob("step*"))


def test_a_run_in_fp8_goes_on_and_is_a_run_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reference of its products."""
    monkeypatch.setattr(prepare, "able", lambda device: True)
    monkeypatch.setattr(loop, "_autocast", lambda job: nullcontext())  # not every CPU has bf16

    def wide(steps: int) -> Recipe:
        return pairs(precision="fp8", steps=steps, save_every=2).model_copy(update={"model": model(width=16)})

    job = make(wide(2), tmp_path / "run")
    fit(job)
    assert any(isinstance(module, Float8Linear | Float8Fused) for module in job.model.modules())
    again = run(wide(4), tmp_path / "run", resume=True)
    assert [row["step"] for row in metrics(tmp_path / "run") if row.get("skipped")] == []
    assert not any(isinstance(module, Float8Linear | Float8Fused) for module in again.model.modules())
