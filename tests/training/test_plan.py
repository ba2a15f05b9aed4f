"""The dry run: what it tells is what training would do, and it leaves nothing behind."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer.config.spec import ConfigError
from anyformer.data.batch import Batch
from anyformer.recipe import Batches, Classify, Data, Packed, ParallelFiles, Recipe, Regress
from anyformer.recipe.ready import read_recipe
from anyformer.training.out_of_memory import OutOfMemory, advise_out_of_memory
from anyformer.training.plan import TrainingPlan, plan
from anyformer.training.step import TrainingStep
from anyformer.training.train import evaluate, train
from tests.training.jobs import changed_loss
from tests.training.small import CROPS, PACKED, PADDED, distances, labelled, make, pairs, parities, quiet, run, text


def recipes(folder: Path) -> dict[str, Recipe]:
    ways: list[Batches] = [PADDED, PACKED]
    found = {f"{shape} {way.kind}": pairs(shape, way) for shape in ("decoder", "encoder-decoder") for way in ways}
    found |= {f"lm {way.kind}": text(folder, way) for way in (*ways, CROPS)}
    found["classify"] = labelled(folder, Classify(), parities())
    return found


KINDS = ["decoder padded", "decoder packed", "encoder-decoder padded", "encoder-decoder packed"]
KINDS += ["lm padded", "lm packed", "lm crops", "classify"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipes(tmp_path)[kind]
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = plan(recipe, quiet())
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written
    job = make(recipe, tmp_path / "run")
    assert found.table.parameters == job.model.num_parameters()
    assert found.memory.weights == found.memory.gradients == 4 * job.model.num_parameters()
    assert found.memory.optimizer == pytest.approx(2 * found.memory.weights, rel=0.01)
    assert 0 <= found.padding < 1
    assert found.seconds > 0
    assert found.tokens_per_second == pytest.approx(recipe.train.accumulate * found.batch_tokens / found.seconds)
    if kind != "lm crops":
        batches = round(recipe.train.steps / found.epochs)
        place, read = job.state.cursor, 0
        for _ in range(batches):
            batch, place = job.loader.read(place)
            read += batch.tokens
        assert (place.epoch, place.batch) == (1, 0)  # so many batches are an epoch, with so many tokens
        assert read == found.tokens
    lines = found.render().splitlines()
    assert [line.split()[0] for line in lines[:8]] == [
        "data", "tokenizer", "model", "batches", "training", "memory", "disk", "time",
    ]  # fmt: skip


def test_a_long_step_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch on a CPU takes minutes: one step says as much as four."""
    taken = []

    class Counted(TrainingStep):
        def __call__(self, batches: list[Batch]) -> Any:
            taken.append(len(batches))
            return super().__call__(batches)

    monkeypatch.setattr("anyformer.training.plan.TrainingStep", Counted)
    monkeypatch.setattr("anyformer.training.plan.LONG_STEP_SECONDS", 0.0)
    assert plan(pairs("decoder", PADDED), quiet()).seconds > 0
    assert taken == [1]


def test_labels_are_told_in_words(tmp_path: Path) -> None:
    rows = parities()
    for example in plan(labelled(tmp_path, Classify(), rows), quiet()).examples:
        assert (example.inputs.removeprefix("<bos> ").removesuffix(" <eos>"), example.labels) in rows
    rows = distances()
    for example in plan(labelled(tmp_path, Regress(), rows, labels=1), quiet()).examples:
        text, pair = example.inputs.removeprefix("<bos> ").removesuffix(" <eos>").split(" <sep> ")
        assert (f"{text} ", pair, example.labels) in rows


def test_rows_are_told_as_the_model_sees_them(tmp_path: Path) -> None:
    (tmp_path / "a.ko").write_text("나는 학생\n큰 집\n", encoding="utf-8")
    (tmp_path / "b.zh").write_text("我 是 学生\n大 房子\n", encoding="utf-8")
    source = ParallelFiles(source=str(tmp_path / "a.ko"), target=str(tmp_path / "b.zh"))

    def seen(shape: Any, batches: Batches) -> TrainingPlan:
        recipe = pairs(shape, batches, valid=None)
        return plan(recipe.model_copy(update={"data": Data(train=source)}), quiet())

    both = {(e.source, e.inputs, e.labels) for e in seen("encoder-decoder", PADDED).examples}
    assert both == {
        ("나는 학생 <eos>", "<bos> 我 是 学生", "我 是 学生 <eos>"),
        ("큰 집 <eos>", "<bos> 大 房子", "大 房子 <eos>"),
    }
    one = {(e.source, e.inputs, e.labels) for e in seen("decoder", PADDED).examples}
    assert one == {
        (None, "나는 학생 <sep> 我 是 学生", "… 我 是 学生 <eos>"),
        (None, "큰 집 <sep> 大 房子", "… 大 房子 <eos>"),
    }
    packed = seen("decoder", Packed(tokens=64, length=32))
    assert [e.inputs for e in packed.examples] in (
        ["나는 학생 <sep> 我 是 学生 ¦ 큰 집 <sep> 大 房子"],
        ["큰 집 <sep> 大 房子 ¦ 나는 학생 <sep> 我 是 学生"],
    )
    assert "\ninput      나는 학생 <sep> 我 是 学生\n" in seen("decoder", PADDED).render()


def test_pictures_and_observations_have_names() -> None:
    scenes = read_recipe("captions-shapes", ["data.train.count=8", "data.valid.count=2", "batches.tokens=200"])
    assert {row.source for row in plan(scenes, quiet()).examples} == {"<image> <eos>"}
    walks = read_recipe("key-to-door", ["data.train.count=8", "data.valid.count=2", "batches.tokens=256"])
    first = plan(walks, quiet()).examples[0].inputs.split()
    assert first[:2] == ["<return-0>", "<features>"]
    assert first[2] in {"<up>", "<down>", "<left>", "<right>"}


def test_bad_rows_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n\ny\n", encoding="utf-8")
    (tmp_path / "b").write_text("u\nv\nw\n", encoding="utf-8")
    source = ParallelFiles(source=str(tmp_path / "a"), target=str(tmp_path / "b"))
    recipe = pairs(valid=None)
    with pytest.raises(ConfigError, match="1 bad row"):
        plan(recipe.model_copy(update={"data": Data(train=source)}), quiet())
    found = plan(recipe.model_copy(update={"data": Data(train=source, on_bad_row="skip")}), quiet())
    assert (found.rows, found.bad) == (2, 1)
    assert found.render().startswith("data       2 pairs, 1 bad rows skipped, ")


def test_checkpointed_activations_take_less() -> None:
    recipe = pairs("encoder-decoder")
    deep = recipe.model.model_copy(
        update={name: stack.model_copy(update={"depth": 6}) for name, stack in recipe.model.stacks.items()}
    )
    kept = plan(recipe.model_copy(update={"model": deep}), quiet()).memory
    train = recipe.train.model_copy(update={"checkpoint_activations": True})
    again = plan(recipe.model_copy(update={"model": deep, "train": train}), quiet()).memory
    assert again.activations < kept.activations / 2
    assert again.weights == kept.weights


def test_accumulation_and_averages_are_counted() -> None:
    once, thrice = plan(pairs(), quiet()), plan(pairs(accumulate=3, ema=0.9), quiet())
    assert thrice.epochs == 3 * once.epochs
    assert (once.memory.average, thrice.memory.average) == (0, thrice.memory.weights)
    assert "12 steps of 3 batches" in thrice.render()


# -- too little memory ------------------------------------------------------------------------------------------------

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    MemoryError(),
]


@pytest.mark.parametrize("error", FULL)
def test_advice(error: Exception, tmp_path: Path) -> None:
    def fail_at_the_fourth(number: int) -> float:
        if number == 4:
            raise error
        return 1.0

    with changed_loss(fail_at_the_fourth), pytest.raises(OutOfMemory) as told:
        train(pairs(save_every=2, accumulate=1, valid=None), tmp_path / "run", console=quiet())
    kept = tmp_path / "run" / "state" / "step-000000002"
    assert str(told.value) == (
        "out of memory after step 3: lower batches.tokens = 64 and raise train.accumulate = 1 by the same factor, "
        f"or set train.checkpoint_activations = true; {kept} stays: "
        f"train.init_from = '{tmp_path / 'run'}' starts from its weights"
    )
    assert (kept / "manifest.json").exists()
    assert os.listdir(tmp_path / "run" / "state") == [kept.name]


def test_advice_for_crops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyformer.tasks import lm

    def fails(*_: Any) -> float:
        raise FULL[0]

    recipe = text(tmp_path, checkpoint_activations=True, steps=1)
    run(recipe, tmp_path / "run")
    monkeypatch.setattr(lm, "total_loss", fails)
    with pytest.raises(OutOfMemory, match=r"^out of memory in evaluation: lower batches\.length = 16, the length"):
        evaluate(tmp_path / "run", split="valid")
    with changed_loss(fails), pytest.raises(OutOfMemory) as told:
        plan(recipe, quiet())
    assert str(told.value) == (
        "out of memory after step 0: lower batches.rows = 4 and raise train.accumulate = 1 by the same factor"
    )


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="shapes"), advise_out_of_memory(lambda: "no"):
        raise RuntimeError("shapes do not fit")
