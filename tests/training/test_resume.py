"""A run that is stopped at any moment and resumed ends as if nothing had happened, to the last bit."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from anyformer.config import ConfigError, TokenLabels, io
from anyformer.data.loader import ExampleLoader
from anyformer.recipe import (
    AdamW,
    Classify,
    Cosine,
    Embed,
    MaskedLanguageModel,
    Ordered,
    OwnTokens,
    Padded,
    PrefixLM,
    Recipe,
    Regress,
    SpanCorruption,
)
from anyformer.training.checkpoint import checkpoint_path, checkpoints
from anyformer.training.loop import Interrupted, fit
from anyformer.training.saving import finish_saves, save
from anyformer.training.signals import Signals
from anyformer.training.train import train
from tests.forking import forking
from tests.training.killed import child
from tests.training.pictured import pictured
from tests.training.small import (
    CROPS,
    PACKED,
    PADDED,
    adapter,
    assert_same_run,
    corrupted,
    distances,
    labelled,
    make,
    metrics,
    mixed,
    pairs,
    parities,
    quiet,
    run,
    said,
    shards,
    spellings,
    stop_at,
    tagging,
    text,
)

HARD = {"accumulate": 2, "ema": 0.9, "schedule": Cosine(warmup=3), "evaluate_every": 5, "save_every": 4, "steps": 12}


def with_types(recipe: Recipe) -> Recipe:
    """Token types that no example has: parameters without a gradient, and without a state in the optimiser."""
    change = {"target": recipe.model.target.model_copy(update={"types": 2})}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=change)})


RECIPES = {
    "decoder, padded": lambda folder: pairs("decoder", PADDED, **HARD),
    "decoder, packed": lambda folder: pairs("decoder", PACKED, **HARD),
    "encoder-decoder, padded": lambda folder: pairs("encoder-decoder", PADDED, **HARD),
    "encoder-decoder, packed": lambda folder: pairs("encoder-decoder", PACKED, **HARD),
    "lm, crops": lambda folder: text(folder, CROPS, **HARD),
    "lm, packed": lambda folder: text(folder, PACKED, **HARD),
    "lm, shards": lambda folder: shards(folder, CROPS, **HARD),
    "lm, shards in order": lambda folder: shards(folder, Ordered(rows=2, length=16), **HARD),
    "mlm": lambda folder: corrupted(folder, MaskedLanguageModel(), **HARD),
    "spans, packed": lambda folder: corrupted(folder, SpanCorruption(sentinels=5), PACKED, **HARD),
    "prefix lm, crops": lambda folder: corrupted(folder, PrefixLM(), CROPS, **HARD),
    "classify": lambda folder: labelled(folder, Classify(), parities(), **HARD),
    "classify, several labels": lambda folder: labelled(folder, Classify(separator=","), parities(), **HARD),
    "regress": lambda folder: labelled(folder, Regress(), distances(), labels=1, types=2, **HARD),
    "regress, apart": lambda folder: labelled(folder, Regress(apart=True), distances(), **HARD),
    "embed": lambda folder: labelled(folder, Embed(), spellings(), best="mrr", **HARD),
    "adapter": lambda folder: adapter(folder, **HARD),
    "mixture": lambda folder: mixed(folder, weight=0.5, **HARD),
    "own tokens": lambda folder: pairs("encoder-decoder", own_tokens=OwnTokens(share=0.5, rise=5), **HARD),
    "tag, packed": lambda folder: tagging(folder, batches=PACKED, label_smoothing=0.1, **HARD),
    "tag, spelled, by a CRF": lambda folder: tagging(
        folder, head=TokenLabels(labels=3, crf=True), spelled=True, best="span_f1", **HARD
    ),
    "frozen, by layers": lambda folder: labelled(
        folder, Classify(), parities(), freeze=("source", "encoder.blocks.0"), layer_decay=0.5, **HARD
    ),
    "images, augmented": lambda folder: pictured(folder, **HARD),
    "averaged": lambda folder: pairs("decoder", PADDED, average=3, keep=1, save_every=3, steps=12, evaluate_every=2),
    "unused parameters": lambda folder: with_types(pairs("encoder-decoder", PADDED, save_every=4)),
    "stops early": lambda folder: pairs("decoder", PADDED, patience=3, evaluate_every=1, optimizer=AdamW(lr=0.1)),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Recipe, Path]]:
    """Runs that nothing interrupted."""
    made = {}
    for name, recipe in RECIPES.items():
        folder = tmp_path_factory.mktemp("reference")
        spec = recipe(folder)
        run(spec, folder / "run")
        made[name] = spec, folder / "run"
    return made


@pytest.mark.parametrize("name", RECIPES)
def test_a_signal_changes_nothing(references: dict[str, tuple[Recipe, Path]], name: str, tmp_path: Path) -> None:
    """Two signals at random moments, each in another step."""
    (recipe, reference), out, chance = references[name], tmp_path / "run", random.Random(name)
    last, accumulate = metrics(reference)[-1]["step"], recipe.train.accumulate
    assert (last < recipe.train.steps) == (name == "stops early")
    first, second = sorted(chance.sample(range(1, last), 2))
    assert stop_at(recipe, out, accumulate * (first - 1) + chance.randint(1, accumulate))
    assert stop_at(recipe, out, accumulate * (second - first - 1) + chance.randint(1, accumulate), resume=True)
    run(recipe, out, resume=True)
    assert_same_run(reference, out)


@pytest.mark.parametrize("step", [10, 11])
def test_a_signal_adds_nothing_to_the_average(
    references: dict[str, tuple[Recipe, Path]], step: int, tmp_path: Path
) -> None:
    """The checkpoint of an interruption is none of those that are averaged."""
    recipe, reference = references["averaged"]
    assert stop_at(recipe, tmp_path / "run", step)
    run(recipe, tmp_path / "run", resume=True)
    assert_same_run(reference, tmp_path / "run")


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
@settings(max_examples=5)
def test_many_signals_change_nothing(
    references: dict[str, tuple[Recipe, Path]], tmp_path_factory: pytest.TempPathFactory, batches: list[int]
) -> None:
    recipe, reference = references["decoder, packed"]
    out = tmp_path_factory.mktemp("many") / "run"
    for batch in batches:
        stop_at(recipe, out, batch, resume=True)
    run(recipe, out, resume=True)
    assert_same_run(reference, out)


def test_a_signal_after_the_save_waits_for_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is told that all is saved must find it saved."""
    job = make(pairs(save_every=4, steps=8), tmp_path / "run")
    evaluations = 0

    class LateSignals(Signals):
        @property
        def received(self) -> bool:  # true from the second read on
            nonlocal evaluations
            evaluations += 1
            return evaluations > 1

        @received.setter
        def received(self, value: bool) -> None: ...

    monkeypatch.setattr("anyformer.training.loop.Signals", LateSignals)
    with pytest.raises(Interrupted, match="step 2 "):
        fit(job)
    assert checkpoints(tmp_path / "run") == [checkpoint_path(tmp_path / "run", 2)]


@pytest.mark.parametrize("name", ["encoder-decoder, packed", "averaged", "classify", "regress"])
def test_five_kills_change_nothing(references: dict[str, tuple[Recipe, Path]], name: str, tmp_path: Path) -> None:
    """SIGKILL at random moments: some by the clock, some within a save."""
    recipe, reference = references[name]
    out, chance = tmp_path / "run", random.Random(name)
    context = forking()
    killed = 0
    for number in range(5):
        moment = (chance.randint(1, 25), None) if number % 2 else (None, chance.uniform(0.05, 0.4))
        process = context.Process(target=child, args=(io.dumps(recipe), out, *moment))
        process.start()
        process.join(timeout=60)
        killed += process.exitcode == -signal.SIGKILL
    assert killed >= 3
    run(recipe, out, resume=True)
    assert_same_run(reference, out)
    assert not list(out.rglob(".tmp-*"))


# -- which checkpoint, and which are kept -----------------------------------------------------------------------------


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(
    references: dict[str, tuple[Recipe, Path]], tmp_path: Path, file: str
) -> None:
    recipe, reference = references["decoder, padded"]
    out, console = tmp_path / "run", quiet()
    assert stop_at(recipe, out, 20)  # in step 10, after the checkpoint of step 8
    newest = checkpoints(out)[-1]
    flip(newest / file, at=len((newest / file).read_bytes()) // 2)
    job = make(recipe, out, resume=True, console=console)
    assert "skipped" in said(console)
    assert str(newest) in said(console)
    assert job.state.step == 8
    run(recipe, out, resume=True)
    assert_same_run(reference, out)


def test_a_damaged_checkpoint_is_written_again(tmp_path: Path) -> None:
    """Its step is reached once more; to leave the damaged one there would be to lose the good ones by and by."""
    recipe, out = pairs(save_every=2, steps=8, keep=1), tmp_path / "run"
    run(recipe, out)
    flip(checkpoints(out)[-1] / "model.safetensors")
    again = run(recipe, out, resume=True)
    assert checkpoints(out)[-1] == checkpoint_path(out, 8)
    make(recipe, out, resume=True)
    assert again.predict(["1 2 3"])


def test_without_any_whole_checkpoint_a_run_begins_again(tmp_path: Path) -> None:
    recipe, out, console = pairs(), tmp_path / "run", quiet()
    run(recipe, out)
    before = (out / "model.safetensors").read_bytes()
    (checkpoints(out)[-1] / "state.json").unlink()
    assert make(recipe, out, resume=True, console=console).state.step == 0
    assert "state.json is missing" in said(console).replace("\n", " ").replace(": is", " is")
    run(recipe, out, resume=True)
    assert (out / "model.safetensors").read_bytes() == before


def test_a_stale_write_is_swept(tmp_path: Path) -> None:
    recipe, out = pairs(), tmp_path / "run"
    run(recipe, out)
    for stale in (out / "state" / ".tmp-step-000000004-ab12", out / ".tmp-x"):
        stale.mkdir()
        (stale / "model.safetensors").write_bytes(b"half")
    (out / ".tmp-metrics.jsonl").write_text("half")
    run(recipe, out, resume=True)
    assert not list(out.rglob(".tmp-*"))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    job = make(pairs(keep=2), tmp_path / "run")
    for step in range(1, 8):
        job.state.step = step
        if step == 3:
            job.state.best, job.state.best_step = 0.1, 3
        save(job)
    finish_saves(job)
    assert checkpoints(tmp_path / "run") == [checkpoint_path(tmp_path / "run", step) for step in (3, 6, 7)]


def test_the_best_is_kept_though_no_save_was_due(tmp_path: Path) -> None:
    """What is loaded at the end is what validation liked best, whatever `save_every` says."""
    out = tmp_path / "run"
    job = make(pairs(evaluate_every=2, steps=8, keep=1), out)
    losses = iter([3.0, 1.0, 2.0, 4.0])
    evaluate = job.task.evaluate

    def told(*args: object) -> object:
        found = evaluate(*args)
        found.values["loss"] = next(losses)
        return found

    job.task.evaluate = told
    fit(job)
    assert job.state.best_step == 4
    assert checkpoints(out) == [checkpoint_path(out, 4), checkpoint_path(out, 8)]


# -- whose folder it is -----------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(pairs(), out)
    before = tree(out)
    for other, field in (
        (pairs(accumulate=2), "train.accumulate"),
        (pairs(batches=Padded(tokens=65)), "batches.tokens"),
        (pairs().model_copy(update={"seed": 1}), "seed"),
    ):
        with pytest.raises(ConfigError, match=f"another run: {field}"):
            make(other, out, resume=True)
    with pytest.raises(ConfigError, match="holds a run: add --resume"):
        make(pairs(), out)
    assert tree(out) == before


def test_more_steps_are_no_other_recipe(tmp_path: Path) -> None:
    run(pairs(steps=6), tmp_path / "run")
    run(pairs(steps=12), tmp_path / "run", resume=True)
    run(pairs(steps=12), tmp_path / "straight")
    one, other = (checkpoints(tmp_path / name)[-1] / "model.safetensors" for name in ("run", "straight"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_files_is_refused(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        train(pairs(), tmp_path, resume=resume, console=quiet())
    assert tree(tmp_path) == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    recipe, out = pairs(), tmp_path / "run"
    run(recipe, tmp_path / "reference")
    make(recipe, out)
    (out / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 1.0}) + '\n{"step": 4, "lo')
    run(recipe, out, resume=True)
    assert_same_run(tmp_path / "reference", out)


def test_a_run_killed_while_its_recipe_was_written_begins_again(tmp_path: Path) -> None:
    (tmp_path / ".anyformer-0123456789abcdef.tmp").write_text("[task]\nki")
    run(pairs(), tmp_path, resume=True)
    assert not list(tmp_path.rglob(".*"))


def test_reading_epochs_anew_is_not_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming reads the batch it needs, and none before it."""
    recipe, out = pairs(steps=12), tmp_path / "run"
    assert stop_at(recipe, out, 10)
    read = []
    real = ExampleLoader.read
    monkeypatch.setattr(ExampleLoader, "read", lambda self, place: (read.append(place), real(self, place))[1])
    job = make(recipe, out, resume=True)
    where = job.state.cursor
    fit(job)
    assert read[0] == where
    assert len(read) == 2
    shutil.rmtree(out)
