"""Training, evaluation and prediction on folders of pictures: what the commands say about damaged ones."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anyformer.cli import app
from anyformer.config import ConfigError, io
from anyformer.recipe import ClassFolders, TableFile
from anyformer.runs.run import load
from anyformer.runs.run_inspection import read as read_text
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


@pytest.mark.parametrize("line", ["q.tiff", "x.mp3", "hello there", "구름 사진", "一张云的照片"])
def test_a_line_without_a_picture_has_no_label(recipe: Path, line: str):
    """All training rows had a picture, so that a label of a text would mean nothing."""
    run = recipe.parent / "run"
    assert call("train", recipe, "--out", run, "train.steps=1").exit_code == 0
    result = call("predict", run, given=f"{recipe.parent / 'all' / 'dark' / '00.png'}\n\n{line}\n")
    assert result.exit_code == 2, result.output
    assert f"line 3: '{line}' names no image, and every training row had one" in result.stderr
    with pytest.raises(ConfigError, match=r"text 1: .* names no image"):
        load(run).predict([line])
    with pytest.raises(ConfigError, match="names no image"):
        read_text(load(run), line)


def test_texts_are_read_where_training_rows_had_no_picture(recipe: Path):
    folder = recipe.parent / "all"
    rows = [(str(folder / "dark" / "00.png"), "dark"), (str(folder / "bright" / "01.png"), "bright"), ("night", "dark")]
    (recipe.parent / "rows.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    mixed = recipe_of(TableFile(path=str(recipe.parent / "rows.tsv"), text="text", label="label"), steps=1)
    io.save(mixed, recipe)
    assert call("train", recipe, "--out", recipe.parent / "run").exit_code == 0
    assert len(load(recipe.parent / "run").predict(["day"])) == 1
