"""`model.from`: the body, the weights and the tokenizer of a run, without a copy of its config in the recipe."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from anyformer.config import ConfigError, Embedder, io
from anyformer.recipe import Classify, Recipe
from anyformer.recipe.ready import read_recipe
from anyformer.training.train import train
from tests.training.small import labelled, parities, run
from tests.training.test_finetune import foreign


def write(recipe: Recipe, folder: Path, model: dict[str, Any]) -> str:
    """Write a recipe with another table in the place of its model, and without its tokenizer."""
    data = {key: value for key, value in io.to_data(recipe).items() if key != "tokenizer"}
    path = folder / "short.toml"
    path.write_text(tomli_w.dumps({**data, "model": model}), encoding="utf-8")
    return str(path)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return labelled(tmp_path, Classify(), parities(), steps=2)


@pytest.fixture
def first(recipe: Recipe, tmp_path: Path) -> Path:
    foreign(recipe, tmp_path / "처음")
    return tmp_path / "처음"


def test_a_short_recipe_is_the_long_one(recipe: Recipe, first: Path, tmp_path: Path) -> None:
    head = {"kind": "classifier", "labels": 2, "pool": "max"}
    short = read_recipe(write(recipe, tmp_path, {"from": str(first), "head": head}))
    body = io.load(type(short.model), first / "config.json")
    assert short.model == body.model_copy(update={"head": short.model.head})
    assert (short.model.head.kind, short.train.init_from, short.tokenizer.kind) == ("classifier", str(first), "run")
    assert io.loads(Recipe, io.dumps(short)) == short  # as a run stores it


def test_settings_beside_it_change_every_block(recipe: Recipe, first: Path, tmp_path: Path) -> None:
    own = {"head": {"kind": "classifier", "labels": 2}, "encoder": {"blocks": {"dropout": 0.25}}}
    model = read_recipe(write(recipe, tmp_path, {"from": str(first), **own})).model
    body = io.load(type(model), first / "config.json")
    assert {block.dropout for block in model.encoder.blocks} == {0.25}
    assert {change.path.rpartition(".")[2] for change in io.diff(body, model)} == {"dropout", "head"}


def test_it_trains_and_continues(recipe: Recipe, first: Path, tmp_path: Path) -> None:
    short = write(recipe, tmp_path, {"from": str(first), "head": {"kind": "classifier", "labels": 2}})
    made = train(short, tmp_path / "run")
    assert made.tokenizer.to_json() == (first / "tokenizer.json").read_text(encoding="utf-8")
    assert set(made.predict(["1 2", "4 5"])) <= {"odd", "even"}
    again = train(short, tmp_path / "again", [f"model.from={tmp_path / 'run'}", "train.steps=1"])
    assert again.config.encoder == made.config.encoder


def test_the_run_can_be_changed(recipe: Recipe, first: Path, tmp_path: Path) -> None:
    short = write(recipe, tmp_path, {"from": "nowhere", "head": {"kind": "classifier", "labels": 2}})
    for key in ("model.from", "train.init_from"):
        assert read_recipe(short, [f"{key}={first}"]).train.init_from == str(first)
    scratch = read_recipe(short, [f"model.from={first}", "tokenizer=words", "train.init_from=none"])
    assert (scratch.train.init_from, scratch.model.width) == (None, recipe.model.width)


def test_a_tie_goes_with_its_head(tmp_path: Path) -> None:
    """A language model's tied output is no part of a classifier."""
    from tests.training.small import pairs

    run(pairs("decoder", steps=1), tmp_path / "lm")
    changes = {"from": str(tmp_path / "lm"), "head": {"kind": "classifier", "labels": 2}}
    model = read_recipe(write(labelled(tmp_path, Classify(), parities()), tmp_path, changes)).model
    assert (model.shape, model.tie) == ("decoder", "none")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"from": "nowhere"}, "model.from = 'nowhere': there is no such run"),
        ({"from": "."}, "model.from = '.': .: is not the folder of a run"),
        ({"from": 3}, "model.from = 3: must be the folder of a run"),
        ({"form": "runs/x"}, "model.form: unknown key"),
    ],
)
def test_refused(
    model: dict[str, Any], words: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_recipe(write(recipe, tmp_path, model))
    assert words in str(caught.value)


def test_a_head_is_required_where_the_task_needs_another(recipe: Recipe, first: Path, tmp_path: Path) -> None:
    assert isinstance(io.load(type(recipe.model), first / "config.json").head, Embedder)
    with pytest.raises(ConfigError, match=r"model\.head = 'embedder': the task classify needs 'classifier'"):
        read_recipe(write(recipe, tmp_path, {"from": str(first)}))
