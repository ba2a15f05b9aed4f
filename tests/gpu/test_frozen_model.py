"""A compiled step with a frozen model on a GPU: the losses are those of the same steps without compilation."""

from pathlib import Path

import pytest
import torch

from anyformer.config import io
from anyformer.recipe import Crops, Data, Packed, Preferences, PreferSorted, Recipe, Teacher
from tests.training.small import metrics, pairs, run, text


def recipes(kind: str, folder: Path) -> tuple[Recipe, Recipe]:
    """Return the recipe of a first run, and one that reads its logits."""
    if kind == "dpo":
        first = pairs(dropout=0.0, valid=None, steps=4)
        digits = Data(train=PreferSorted(count=40, shortest=2, longest=5))
        change = {"task": Preferences(max_target=6), "data": digits}
        second = pairs(dropout=0.0, valid=None, steps=6, init_from=str(folder / "first")).model_copy(update=change)
        return first, second
    teacher = Teacher(run=str(folder / "first"))
    if kind == "crops":
        crops = Crops(rows=4, length=16)
        return text(folder, crops, 0.0, steps=4), text(folder, crops, 0.0, steps=6, teacher=teacher)
    packed = Packed(tokens=64, length=32)
    first = pairs("encoder-decoder", packed, 0.0, None, steps=4)
    return first, pairs("encoder-decoder", packed, 0.0, None, steps=6, teacher=teacher)


@pytest.mark.parametrize("kind", ["crops", "packed", "dpo"])
def test_compiled_steps_equal_eager_ones(kind: str, tmp_path: Path) -> None:
    first, second = recipes(kind, tmp_path)
    run(first, tmp_path / "first")
    losses = []
    for compile in ("off", "on"):
        torch.compiler.reset()
        run(io.override(second, [f"train.compile={compile}", "train.precision=bf16"]), tmp_path / compile)
        losses.append([row["loss"] for row in metrics(tmp_path / compile) if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
