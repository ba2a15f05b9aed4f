"""`model.head.labels = "auto"`: as many outputs as the training rows have labels."""

from pathlib import Path

import pytest

from anyformer.config import Classifier, ConfigError, ModelConfig, TokenLabels, io
from anyformer.recipe import Classify, Recipe, Regress
from anyformer.runs.run import load
from anyformer.training.plan import plan
from anyformer.training.train import evaluate
from tests.test_cli import refused
from tests.training.small import distances, labelled, make, parities, quiet, run, tagging

AUTO = ["model.head.labels=auto"]


def classified(folder: Path) -> Recipe:
    return labelled(folder, Classify(), [*parities(), ("1 2", "신규")], labels=3, steps=2, save_every=1)


def tagged(folder: Path) -> Recipe:
    return tagging(folder, steps=2, save_every=1)


@pytest.mark.parametrize("recipe", [classified, tagged])
def test_labels_are_counted_in_the_training_rows(recipe: object, tmp_path: Path) -> None:
    """The model is the one with the number; the run stores the number in its config, and resumes and evaluates."""
    assert callable(recipe)
    plain = recipe(tmp_path)
    auto = io.override(plain, AUTO)
    made = run(auto, tmp_path / "auto")
    assert made.config == run(plain, tmp_path / "plain").config == io.load(ModelConfig, tmp_path / "auto/config.json")
    assert isinstance(made.config.head, Classifier | TokenLabels)
    assert made.config.head.labels == 3
    assert io.load(Recipe, tmp_path / "auto/recipe.toml") == auto
    assert make(auto, tmp_path / "auto", resume=True).state.step == 2
    assert evaluate(tmp_path / "auto", split="valid") == evaluate(tmp_path / "plain", split="valid")
    assert load(tmp_path / "auto").config == made.config
    assert plan(auto, quiet()).render()


def test_auto_is_for_recipes_with_labels(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.head\.labels = auto: the task regress predicts one number: set it"):
        io.override(labelled(tmp_path, Regress(), distances(), labels=1), AUTO)
    path = tmp_path / "recipe.toml"
    io.save(io.override(classified(tmp_path), [*AUTO, "model.source.vocab=50"]), path)
    (line,) = refused("count", path)
    assert line == "model.head.labels = 'auto': follows from the data; add model.head.labels=2"
    model = io.load(Recipe, path).model
    io.save(model, tmp_path / "model.toml")
    assert refused("count", tmp_path / "model.toml") == [
        "head.labels = 'auto': follows from the data; add head.labels=2"
    ]
    from anyformer.nn.model import Transformer

    with pytest.raises(ConfigError, match=r"^head\.labels = 'auto': only a recipe counts"):
        Transformer(model)


@pytest.mark.parametrize("value", ["x", "0", "1.5", "[]"])
def test_a_wrong_number_of_labels_is_one_fault(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        io.override(classified(tmp_path), [f"model.head.labels={value}"])
    assert [fault.path for fault in error.value.faults] == ["model.head.labels"]
    assert str(error.value).endswith(" or 'auto'")
