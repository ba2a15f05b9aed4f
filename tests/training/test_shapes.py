"""What a GPU compiles, it compiles once: batches that are compiled for have few shapes, and early."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from anyformer.recipe import Crops, Packed, Padded, Recipe
from anyformer.recipe.ready import names, read_recipe
from anyformer.training.machine import choose_compile
from anyformer.training.prepare import prepare
from anyformer.training.step import TrainingStep, set_learning_rate

CUDA = torch.device("cuda")


def is_compiled(recipe: Recipe) -> bool:
    shapes = 2 if isinstance(recipe.batches, Padded) else 1
    return choose_compile(recipe.train.compile, CUDA, shapes, fault=None).value == "on"


COMPILED = [name for name in names() if is_compiled(read_recipe(name))]


def stand_in(folder: Path, kind: str) -> dict[str, Any]:
    """Lines of many lengths in the place of a recipe's texts."""
    drawn = random.Random(0)
    for name in ("one", "two"):
        lines = (" ".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(3, 40))) for _ in range(120))
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    if kind == "seq2seq":
        return {"kind": "parallel", "source": "one", "target": "two"}
    return {"kind": "text", "path": "one", "document": "line" if kind == "mlm" else "file"}


def test_all_but_padded_rows_are_compiled() -> None:
    """Padded rows have a shape for each length; what is compiled for one would be for no other."""
    for name in names():
        assert (name in COMPILED) == (not isinstance(read_recipe(name).batches, Padded))


# Trajectories have as many observations as a batch has steps: one more compilation makes their number free.
@pytest.mark.parametrize("name", [name for name in COMPILED if read_recipe(name).task.kind != "actions"])
def test_nothing_is_compiled_after_the_first_batches(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(name)
    changes = ["model.width=16"]
    for side, stack in recipe.model.stacks.items():
        changes += [f"model.{side}.depth=1", f"model.{side}.blocks.*.mixer.heads=2"]
        changes += [f"model.{side}.blocks.*.feedforward.width=16"]
        changes += [f"model.{side}.blocks.*.cross.heads=2"] if stack.blocks[0].cross else []
    data = stand_in(tmp_path, recipe.task.kind)
    inner = ", ".join(f"{key}='{value}'" for key, value in data.items())
    changes += ["train.teacher=none"]  # it would be another run
    changes += [f"data={{root='{tmp_path}', train={{{inner}}}}}", "tokenizer='chars'"]
    if isinstance(recipe.batches, Packed):
        changes += ["batches.tokens=512", "batches.length=128"]
    elif isinstance(recipe.batches, Crops):
        changes += ["batches.rows=4", "batches.length=32"]
    made = read_recipe(name, changes)
    job = prepare(made, tmp_path / "run", resume=False, console=Console(quiet=True))
    compiled: list[int] = []
    number = 0

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        compiled.append(number)
        return graph.forward

    torch.compiler.reset()
    take_step = TrainingStep(job, torch.compile(job.objective, backend=count))
    epochs = set()
    for number in range(16):
        set_learning_rate(job, 1e-3 / (1 + number))
        epochs.add(job.state.cursor.epoch)
        batch, job.state.cursor = job.loader.read(job.state.cursor)
        take_step([batch])
    assert compiled
    assert max(compiled) <= 1
    assert len(epochs) > 1 or not isinstance(recipe.batches, Packed)  # the last batch of an epoch was among them
