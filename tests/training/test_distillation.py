"""Distillation: the loss is the stated one, and a teacher changes nothing but the loss."""

import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from torch.nn import functional as F

from anyformer.config import ConfigError, Learned, TokenLabels, io
from anyformer.data.batch import Batch
from anyformer.data.loader import Cursor, ExampleLoader
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import (
    Classify,
    Data,
    MaskedLanguageModel,
    Packed,
    ParallelFiles,
    Recipe,
    Regress,
    RunTokenizer,
    Teacher,
)
from anyformer.runs.run import load
from anyformer.tasks.base import call, token_loss
from anyformer.training.checkpoint import checkpoints
from anyformer.training.distillation import soft_loss
from anyformer.training.job import Job
from anyformer.training.parallel import join
from anyformer.training.plan import plan
from anyformer.training.train import train
from tests.training.small import (
    CROPS,
    PACKED,
    PADDED,
    assert_same_run,
    corrupted,
    distances,
    labelled,
    make,
    metrics,
    pairs,
    parities,
    quiet,
    run,
    stop_at,
    tagging,
    text,
)
from tests.training.two_processes import SMOOTH, assert_alike, ends, spawn

RECIPES: dict[str, Any] = {
    "decoder, padded": lambda folder, **more: pairs("decoder", PADDED, dropout=0.0, **more),
    "decoder, packed": lambda folder, **more: pairs("decoder", PACKED, dropout=0.0, **more),
    "translation, padded": lambda folder, **more: pairs("encoder-decoder", PADDED, dropout=0.0, **more),
    "translation, packed": lambda folder, **more: pairs("encoder-decoder", PACKED, dropout=0.0, **more),
    "lm": lambda folder, **more: text(folder, CROPS, dropout=0.0, **more),
    "mlm": lambda folder, **more: corrupted(folder, MaskedLanguageModel(), **more),
    "classify": lambda folder, **more: labelled(folder, Classify(), parities(), **more),
    "tag": lambda folder, **more: tagging(folder, **more),
    "tag, packed": lambda folder, **more: tagging(folder, batches=PACKED, **more),
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run for each recipe."""
    made = {}
    for name, recipe in RECIPES.items():
        folder = tmp_path_factory.mktemp("teacher")
        made[name] = folder / "run"
        run(recipe(folder, steps=4), made[name])
    return made


def student(name: str, teachers: dict[str, Path], folder: Path, **settings: Any) -> Recipe:
    spec = {key: settings.pop(key) for key in ("temperature", "weight") if key in settings}
    return RECIPES[name](folder, teacher=Teacher(run=str(teachers[name]), **spec), **settings)


def first_loss(job: Job) -> float:
    return loss_of(job, job.loader.read(Cursor())[0])


def loss_of(job: Job, batch: Batch) -> float:
    """Return the summed loss of a batch, without dropout."""
    job.model.eval()
    packed = isinstance(job.recipe.batches, Packed)
    arguments = job.objective.arguments(job.objective.select_labels(batch), packed)
    frozen = None if job.frozen is None else job.frozen(*arguments[0])
    return float(job.objective(*arguments, None, frozen)[0].detach())


logit = st.floats(-8, 8)


@given(st.lists(st.tuples(logit, logit, logit, logit), min_size=1, max_size=5), st.floats(0.25, 8), st.randoms())
def test_the_gradient_is_the_analytic_one(
    rows: list[tuple[float, ...]], temperature: float, rng: random.Random
) -> None:
    student = torch.tensor(rows, dtype=torch.float32)[None].requires_grad_()
    teacher = torch.tensor([rng.sample(row, 4) for row in rows], dtype=torch.float32)[None]
    labels = torch.tensor([[rng.choice([0, IGNORE]) for _ in rows]])
    soft_loss(student, teacher, labels, temperature).backward()
    difference = (student / temperature).softmax(-1) - (teacher / temperature).softmax(-1)
    expected = temperature * difference * (labels != IGNORE)[..., None]
    torch.testing.assert_close(student.grad, expected.detach(), rtol=1e-4, atol=1e-5)


@given(st.lists(st.tuples(logit, logit, logit), min_size=1, max_size=5), st.floats(0.25, 8))
def test_the_loss_is_a_divergence(rows: list[tuple[float, ...]], temperature: float) -> None:
    """It is 0 for equal logits, also up to a constant, and torch's KL for others."""
    z = torch.tensor(rows, dtype=torch.float32)[None]
    labels, y = torch.zeros(1, len(rows), dtype=torch.long), z.flip(-1)
    assert float(soft_loss(z, z + 3, labels, temperature)) == pytest.approx(0, abs=1e-4)
    kl = F.kl_div((z / temperature).log_softmax(-1), (y / temperature).softmax(-1), reduction="sum")
    assert float(soft_loss(z, y, labels, temperature)) == pytest.approx(float(temperature**2 * kl), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_with_weight_0_the_loss_is_the_plain_one(name: str, teachers: dict[str, Path], tmp_path: Path) -> None:
    plain = make(RECIPES[name](tmp_path), tmp_path / "plain")
    distilled = make(student(name, teachers, tmp_path, weight=0.0), tmp_path / "distilled")
    assert first_loss(distilled) == pytest.approx(first_loss(plain), rel=1e-5)
    other = make(student(name, teachers, tmp_path, weight=0.5), tmp_path / "other")
    assert first_loss(other) != pytest.approx(first_loss(plain), rel=1e-3)


@pytest.mark.parametrize("name", ["decoder, packed", "translation, padded", "lm"])
def test_the_loss_is_the_stated_mixture(name: str, teachers: dict[str, Path], tmp_path: Path) -> None:
    job = make(student(name, teachers, tmp_path, weight=0.3, temperature=3.0), tmp_path / "run")
    batch, _ = job.loader.read(Cursor())
    packed = isinstance(job.recipe.batches, Packed)
    teacher = load(teachers[name]).model
    with torch.no_grad():
        z, y = call(job.model.eval(), batch, packed), call(teacher, batch, packed)
    keep = batch.labels != IGNORE
    kl = F.kl_div((z[keep] / 3).log_softmax(-1), (y[keep] / 3).softmax(-1), reduction="sum")
    expected = 0.7 * token_loss(z, batch.labels) + 0.3 * 9 * kl
    assert first_loss(job) == pytest.approx(float(expected), rel=1e-4)


def test_the_plan_counts_the_memory_of_the_teacher(teachers: dict[str, Path], tmp_path: Path) -> None:
    alone = plan(RECIPES["decoder, padded"](tmp_path), quiet())
    taught = plan(student("decoder, padded", teachers, tmp_path), quiet())
    weights = sum(p.nbytes for p in load(teachers["decoder, padded"]).model.parameters())
    assert (alone.memory.frozen, taught.memory.frozen) == (0, weights)
    assert taught.memory.total == alone.memory.total + weights
    assert "frozen model" in taught.render()
    assert "frozen model" not in alone.render()


def test_a_student_that_is_its_teacher_has_nothing_to_learn(teachers: dict[str, Path], tmp_path: Path) -> None:
    name = "decoder, padded"
    job = make(student(name, teachers, tmp_path, weight=1.0, init_from=str(teachers[name])), tmp_path / "run")
    assert first_loss(job) == pytest.approx(0, abs=1e-4)


def test_the_teacher_is_frozen_and_not_saved(teachers: dict[str, Path], tmp_path: Path) -> None:
    name = "translation, packed"
    recipe = student(name, teachers, tmp_path, steps=3)
    job = make(recipe, tmp_path / "other")
    assert job.frozen is not None
    assert not any(p.requires_grad for p in job.frozen.parameters())
    assert not any(module.training for module in job.frozen.modules())
    assert {name.split(".")[0] for name, _ in job.objective.named_parameters()} == {"model"}
    done = run(recipe, tmp_path / "run")
    before, after = load(teachers[name]).model.state_dict(), job.frozen.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    plain = run(RECIPES[name](tmp_path, steps=3), tmp_path / "plain")
    assert done.model.state_dict().keys() == plain.model.state_dict().keys()
    for file in ("model.safetensors", "state.safetensors"):
        with (
            safe_open(checkpoints(tmp_path / "run")[-1] / file, "pt") as a,
            safe_open(checkpoints(tmp_path / "plain")[-1] / file, "pt") as b,
        ):
            assert set(a.keys()) == set(b.keys())


@pytest.mark.parametrize("name", ["decoder, packed", "translation, padded", "classify"])
def test_a_resumed_run_is_the_same(name: str, teachers: dict[str, Path], tmp_path: Path) -> None:
    recipe = student(name, teachers, tmp_path, steps=8, accumulate=2, ema=0.9, save_every=3)
    run(recipe, tmp_path / "whole")
    assert stop_at(recipe, tmp_path / "parts", 9)
    run(recipe, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_changed_teacher_is_refused(teachers: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(teachers["decoder, padded"], folder)
    recipe = pairs(dropout=0.0, steps=6, teacher=Teacher(run=str(folder)))
    assert stop_at(recipe, tmp_path / "run", 3)
    shutil.rmtree(folder)
    run(pairs(dropout=0.0, steps=5), folder)
    with pytest.raises(ConfigError, match=r"train\.teacher\.run = .*: changed since step-.*--allow-changed-data"):
        make(recipe, tmp_path / "run", resume=True)


def test_the_loss_of_accumulated_batches_is_that_of_all_labels(teachers: dict[str, Path], tmp_path: Path) -> None:
    name = "decoder, packed"
    recipe = student(name, teachers, tmp_path, steps=1, accumulate=2, valid=None)
    job = make(recipe, tmp_path / "other")
    assert job.frozen is not None
    batches = [job.loader.read(Cursor(0, i))[0] for i in range(2)]
    total = sum(loss_of(job, batch) for batch in batches)
    run(recipe, tmp_path / "run")
    labels = sum(batch.target_count for batch in batches)
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(total / labels, rel=1e-4)


def test_the_tokenizer_may_be_the_teachers(teachers: dict[str, Path], tmp_path: Path) -> None:
    recipe = student("lm", teachers, tmp_path).model_copy(update={"tokenizer": RunTokenizer()})
    job = make(recipe, tmp_path / "run")
    assert job.task.tokenizer.to_json() == load(teachers["lm"]).tokenizer.to_json()


def test_the_outputs_of_a_teacher_are_targets(teachers: dict[str, Path], tmp_path: Path) -> None:
    """Sequence level: a run predicts the training sources, and its lines are the targets of another."""
    sources = [" ".join(str(n)) for n in range(100, 130)]
    teacher = load(teachers["translation, padded"])
    said = teacher.predict(sources, beams=3)
    for name, lines in (("sources", sources), ("targets", said)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    kept = sum(bool(line.strip()) for line in said)
    source = ParallelFiles(source=str(tmp_path / "sources"), target=str(tmp_path / "targets"))
    recipe = pairs("encoder-decoder", valid=None, teacher=Teacher(run=str(teachers["translation, padded"])))
    recipe = recipe.model_copy(update={"data": Data(train=source, on_bad_row="skip"), "tokenizer": RunTokenizer()})
    job = make(recipe, tmp_path / "run")
    batch, _ = job.loader.read(Cursor())
    assert isinstance(job.loader, ExampleLoader)
    assert len(job.loader.table) == kept
    for row, number in enumerate(batch.examples):
        labels = [id for id in batch.labels[row].tolist() if id not in (IGNORE, job.task.tokenizer.eos)]
        assert job.task.tokenizer.decode(labels) == [line for line in said if line.strip()][number]


# -- several processes ------------------------------------------------------------------------------------------------

LAYOUTS = {"ddp": "parallel.shard=none", "fsdp": "parallel.shard=full", "tensor": "parallel.tensor=2"}


def taught(folder: Path) -> Recipe:
    recipe = pairs(valid=None, dropout=0.0, steps=4, optimizer=SMOOTH, teacher=Teacher(run=str(folder / "teacher")))
    return io.override(recipe, ["model.target.vocab=16"])


def train_in_two(folder: Path) -> None:
    torch.set_num_threads(1)
    with join(agreed=()), mock.patch("anyformer.training.train.draw_curve", return_value=None):
        for name, layout in LAYOUTS.items():
            train(io.override(taught(folder), [layout]), folder / name, console=quiet())


@pytest.mark.system
def test_two_processes_learn_as_one(tmp_path: Path) -> None:
    run(
        io.override(pairs(valid=None, steps=4), ["model.target.vocab=16", "model.decoder.depth=2"]),
        tmp_path / "teacher",
    )
    run(taught(tmp_path), tmp_path / "one")
    codes, _, complaints = ends(spawn(tmp_path, train_in_two, tmp_path))
    assert codes == [0, 0], "\n".join(complaints)
    for name in LAYOUTS:
        assert_alike(tmp_path / "one", tmp_path / name)


# -- what cannot be taught --------------------------------------------------------------------------------------------


def refused(recipe: Recipe, folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        make(recipe, folder / "refused")
    assert not (folder / "refused").exists()
    return str(error.value)


def test_another_vocabulary_is_refused(teachers: dict[str, Path], tmp_path: Path) -> None:
    recipe = text(tmp_path, teacher=Teacher(run=str(teachers["decoder, padded"])))
    assert "its tokenizer differs: set tokenizer = 'run'" in refused(recipe, tmp_path)


def test_other_labels_are_refused(teachers: dict[str, Path], tmp_path: Path) -> None:
    rows = [(text, f"is {label}") for text, label in parities()]
    recipe = labelled(tmp_path, Classify(), rows, teacher=Teacher(run=str(teachers["classify"])))
    assert "its labels are even, odd, and those of the task is even, is odd" in refused(recipe, tmp_path)


def test_another_shape_is_refused(teachers: dict[str, Path], tmp_path: Path) -> None:
    recipe = pairs("decoder", teacher=Teacher(run=str(teachers["translation, padded"])))
    assert "is a model of the shape 'encoder-decoder', and this one is 'decoder'" in refused(recipe, tmp_path)


def test_a_missing_teacher_is_refused(tmp_path: Path) -> None:
    message = refused(pairs(teacher=Teacher(run=str(tmp_path / "none"))), tmp_path)
    assert "train.teacher.run" in message


def test_rows_longer_than_the_teachers_positions_are_refused(tmp_path: Path) -> None:
    recipe = pairs(steps=1)
    decoder = recipe.model.decoder
    assert decoder is not None
    short = decoder.model_copy(update={"position": Learned(length=9)})
    model = recipe.model.model_copy(update={"decoder": short})
    data = io.override(recipe, ["data.train.longest=3", "data.valid.longest=3"]).data
    run(recipe.model_copy(update={"model": model, "data": data}), tmp_path / "teacher")
    message = refused(pairs(teacher=Teacher(run=str(tmp_path / "teacher"))), tmp_path)
    assert "cannot read" in message
    assert "9 learned positions" in message


@pytest.mark.parametrize(
    ("make_recipe", "why"),
    [
        (lambda f, **m: labelled(f, Regress(), distances(), labels=1, **m), "the task regress has none"),
        (lambda f, **m: labelled(f, Classify(separator=","), parities(), **m), "each label is decided separately"),
        (lambda f, **m: tagging(f, head=TokenLabels(labels=3, crf=True), **m), "a CRF has none per word"),
    ],
)
def test_losses_without_a_softmax_are_refused(make_recipe: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        make_recipe(tmp_path, teacher=Teacher(run="runs/teacher"))


def test_further_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="multi_token"):
        io.override(pairs(teacher=Teacher(run="x")), ["model.head.multi_token={tokens=2}"])
