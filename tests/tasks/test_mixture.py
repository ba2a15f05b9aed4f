"""A mixture of tasks: one model, a token for each task, rows as often as weights say, and each part as it is alone."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from anyformer.config import ConfigError, io
from anyformer.data.batch import Example
from anyformer.data.loader import Cursor, ExampleLoader
from anyformer.data.readers import read
from anyformer.recipe import Padded
from anyformer.runs.run import Run, load
from anyformer.tasks.mixture import MixedTasks
from anyformer.training.train import evaluate
from tests.training.small import Shape, mixed, pairs, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """That has learnt both."""
    folder = tmp_path_factory.mktemp("mixed")
    recipe = io.override(
        mixed(folder, steps=150),
        ["model.width=32", "model.encoder.blocks.*.dropout=0.0", "model.decoder.blocks.*.dropout=0.0"],
    )
    return run(
        io.override(recipe, ["batches.tokens=512", "train.optimizer.lr=5e-3", "model.init=xavier"]), folder / "run"
    )


def test_one_model_does_both(trained: Run) -> None:
    assert trained.predict(["c"], task="large") == ["C"]
    assert trained.predict(["c"], task="copy") == ["c"]


def test_a_part_is_a_run_of_its_task(trained: Run) -> None:
    part = trained.part("large")
    assert part.predict(["c"]) == part.generate(["c"]) == trained.predict(["c"], task="large")
    likely, unlikely = (trained.part(name).score(["c"], ["C"])[0].total for name in ("large", "copy"))
    assert likely > unlikely


def test_it_comes_back_from_its_folder(trained: Run) -> None:
    again = load(trained.folder)
    assert again.predict(["h"], task="large") == trained.predict(["h"], task="large")


def test_parts_are_evaluated_one_by_one(trained: Run) -> None:
    values = evaluate(trained.folder, split="valid").values
    for metric in ("loss", "exact_match"):
        assert values[metric] == pytest.approx((values[f"large.{metric}"] + values[f"copy.{metric}"]) / 2)
    assert values["exact_match"] > 0.9


@pytest.mark.parametrize("name", [None, "copi"])
def test_which_task_must_be_said(trained: Run, name: str | None) -> None:
    with pytest.raises(ConfigError, match="large, copy" if name is None else "did you mean 'copy'"):
        trained.predict(["c"], task=name)
    with pytest.raises(ConfigError, match="choose one of the mixture"):
        trained.generate(["c"])


def test_a_run_of_one_task_has_no_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run is of one task, seq2seq"):
        run(pairs(steps=1), tmp_path / "run").part("copy")


@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_the_task_is_read_first(tmp_path: Path, shape: Shape) -> None:
    made = run(mixed(tmp_path, shape, steps=1), tmp_path / "run")
    assert isinstance(made.task, MixedTasks)
    for name, part in made.task.parts.items():
        row = part.prompts(["c"], made.config)[0]
        assert row[0] == made.tokenizer.special_id(f"<task:{name}>")
        assert made.tokenizer.decode(row) == "c"
        assert part.prompts([" "], made.config) == [[]]


@pytest.mark.parametrize("weights", [[1.0] * 6, [2.0, 0.5, 0.5, 1.0, 0.25, 3.5], [0.01] * 6])
def test_examples_are_read_as_often_as_their_weight_says(weights: list[float]) -> None:
    pieces = [Example([i] * (1 + i % 3), [i] * (1 + i % 3)) for i in range(6)]
    loader = ExampleLoader(pieces, Padded(tokens=8), seed=0, pad=0, source_pad=0, weights=weights)
    epochs = 400
    seen = Counter(i for epoch in range(epochs) for batch in loader.plan(epoch) for row in batch for i in row)
    if weights[0] < 0.1:  # an epoch is never empty
        assert all(loader.plan(epoch) for epoch in range(20))
        return
    for i, weight in enumerate(weights):
        spread = np.sqrt((weight % 1) * (1 - weight % 1) / epochs)
        assert seen[i] / epochs == pytest.approx(weight, abs=4 * spread + 1e-9)


def test_without_weights_nothing_changes() -> None:
    pieces = [Example([i] * (1 + i % 5), [i] * (1 + i % 5)) for i in range(40)]
    spec = Padded(tokens=20)
    plain, weighed = (ExampleLoader(pieces, spec, 3, 0, 0, weights=w) for w in (None, [1.0] * 40))
    place = Cursor()
    for _ in range(30):
        (a, after), (b, _) = plain.read(place), weighed.read(place)
        assert torch.equal(a.ids, b.ids)
        place = after


def test_rows_know_where_they_stand(tmp_path: Path) -> None:
    recipe = mixed(tmp_path)
    rows = read(recipe.data.train, recipe.data, "train", 0)
    assert rows.columns["task"] == ["large"] * 8 + ["copy"] * 8
    assert rows.origin(7).endswith("large.tsv:9")
    assert rows.origin(8).endswith("copy.tsv:2")


def test_a_bad_row_is_told_with_its_own_file(tmp_path: Path) -> None:
    recipe = io.override(mixed(tmp_path, steps=1), ["task.parts.1.max_target=1"])
    (tmp_path / "copy.tsv").write_text("source\ttarget\na\ta\nb\tb b\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"copy\.tsv:3: the target has 2 tokens, more than task\.max_target = 1"):
        run(recipe, tmp_path / "run")


BAD = {
    "task.parts.1.name=large": "two are named 'large'",
    "data.train.parts.1.name=copie": "did you mean 'copy'",
    "data.train.parts.1.name=large": "there is no source for 'copy'",
    'data.train={kind="copy", count=5}': "= 'copy': the task mixture needs 'mixed'",
    'batches={kind="crops", rows=2, length=4}': "crops of one long text",
    "task.parts.0.name=A b": "task.parts.0.name",
    "task.parts.0.weight=0.0": "task.parts.0.weight",
}


@pytest.mark.parametrize("change", BAD)
def test_what_is_wrong_is_told(change: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        io.override(mixed(tmp_path), [change])
    assert BAD[change] in str(error.value)


def test_mixed_rows_are_for_mixtures(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="= 'mixed': the task seq2seq needs pairs"):
        pairs().model_copy(update={"data": mixed(tmp_path).data})
