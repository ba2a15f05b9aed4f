"""Training, evaluation and prediction on folders of pictures: what the commands say about damaged ones."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anyformer.cli import app
from anyformer.config import io
from anyformer.recipe import ClassFolders
from tests.training.pictured import dark_and_bright, recipe_of

PIL = pytest.importorskip("PIL.Image")


def call(*arguments: str | Path, given: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    images, labels = dark_and_bright()
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "all" / ("dark", "bright")[label]
        folder.mkdir(parents=True, exist_ok=True)
        PIL.fromarray(image).save(folder / f"{i:02}.png")
    made = recipe_of(ClassFolders(path=str(tmp_path / "all"), media="image"), steps=60)
    io.save(made, tmp_path / "recipe.toml")
    return tmp_path / "recipe.toml"


def test_damaged_pictures_are_named_or_skipped(recipe: Path):
    folder = recipe.parent / "all" / "dark"
    (folder / "broken.png").write_bytes((folder / "00.png").read_bytes()[:30])
    PIL.new("L", (6, 4)).save(folder / "wide.png")
    result = call("train", recipe, "--out", recipe.parent / "run")
    assert result.exit_code == 2
    assert "broken.png is no readable picture" in result.stderr
    assert "wide.png has 6×4 pixels, and the model reads 4×4: resize it" in result.stderr
    assert "2 bad rows and 24 good" in result.stderr
    assert not (recipe.parent / "run").exists()
    skipped = call("train", recipe, "--out", recipe.parent / "run", "data.on_bad_row=skip", "train.steps=1")
    assert skipped.exit_code == 0, skipped.output


def test_predict_takes_paths(recipe: Path):
    run = recipe.parent / "run"
    assert call("train", recipe, "--out", run).exit_code == 0
    dark, bright = (recipe.parent / "all" / name for name in ("dark/00.png", "bright/01.png"))
    result = call("predict", run, given=f"{dark}\n<image:{bright}>\n")
    assert result.stdout == "dark\nbright\n", result.output
    assert call("predict", run, bright).stdout == "bright\n"
    missing = call("predict", run, given="none.png\n")
    assert missing.exit_code == 2
    assert "none.png does not exist" in missing.stderr
