"""Classification and regression: rows and recipes that are refused, one line each."""

from pathlib import Path

import pytest

from anyformer.config import ConfigError, io
from anyformer.recipe import Classify, Recipe, Regress
from tests.tasks.refused import told
from tests.training.small import distances, labelled, make, parities, run


def with_valid(recipe: Recipe, folder: Path, *rows: tuple[str, ...]) -> Recipe:
    names = [name for name in ("text", "pair", "label") if getattr(recipe.data.train, name) is not None]
    (folder / "valid.tsv").write_text("\n".join("\t".join(row) for row in (names, *rows)), encoding="utf-8")
    table = recipe.data.train.model_copy(update={"path": str(folder / "valid.tsv")})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"valid": table})})


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (("1 2", "evn"), "the label 'evn' does not occur in training: did you mean 'even'?"),
        (("1 2", "Mittwoch"), "the label 'Mittwoch' does not occur in training: known here: even, odd"),
        (("1 2", " "), "the label is empty"),
        ((" ", "odd"), "the text is empty"),
        (("1 2", "odd", "even"), "has 3 columns, the first row has 2, separated by tabs"),
    ],
)
def test_bad_rows_of_labels(tmp_path: Path, row: tuple[str, ...], why: str) -> None:
    recipe = with_valid(labelled(tmp_path, Classify(), parities()), tmp_path, ("1", "odd"), row)
    first, second = told(recipe, tmp_path)
    assert first.startswith("data.valid: 1 bad row and 1 good")
    assert second == f"{tmp_path / 'valid.tsv'}:3: {why}"
    skipping = recipe.model_copy(update={"data": recipe.data.model_copy(update={"on_bad_row": "skip"})})
    assert len(make(skipping, tmp_path / "run").valid or ()) == 1


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (("1", "2", "zwei"), "the label 'zwei' is not a number"),
        (("1", "2", "nan"), "the label 'nan' is not a number"),
        (("1", "2", ""), "the label '' is not a number"),
        (("1", "", "2"), "the pair is empty"),
    ],
)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_bad_rows_of_numbers(tmp_path: Path, row: tuple[str, ...], why: str, split: str) -> None:
    rows = distances(5)
    if split == "train":
        recipe, file, line = labelled(tmp_path, Regress(), [*rows, row], labels=1), "rows.tsv", 7
    else:
        recipe, file, line = with_valid(labelled(tmp_path, Regress(), rows, labels=1), tmp_path, row), "valid.tsv", 2
    assert f"{tmp_path / file}:{line}: {why}" in "\n".join(told(recipe, tmp_path))


def test_rows_that_are_too_long(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Classify(), [*parities(), ("1 " * 80, "odd")])
    assert told(recipe, tmp_path)[1] == f"{tmp_path / 'rows.tsv'}:42: has 82 tokens, and a padded row holds 64"
    limited = io.override(recipe, ["model.encoder.position={kind='learned', length=20}"])
    assert told(limited, tmp_path)[1].endswith("rows.tsv:42: has 82 tokens, and the encoder has 20 learned positions")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (["model.head.labels=3"], "model.head.labels = 3: the task has 2 labels: even, odd"),
        (["task.labels=['odd','even','odd']"], "task.labels = ['odd', 'even', 'odd']: 'odd' occurs twice"),
        (
            ["batches={kind='packed', tokens=64, length=32}"],
            "batches.kind = 'packed': the task classify has one output per row: use 'padded'",
        ),
        (["model.head=lm"], "model.head = 'lm': the task classify needs 'classifier'"),
        (
            ["task.separator=','", "train.label_smoothing=0.1"],
            "train.label_smoothing = 0.1: needs one correct label among several",
        ),
        (["task.pairs=true"], "the task classify needs the columns `text`, `pair` and `label`"),
        (["data.train.pair=text"], "data.train.pair = 'text': set task.pairs = true, or leave it out"),
        (["task.kind=regress"], "model.head.labels = 2: the task regress predicts one number"),
        (["train.best=spearman"], "train.best = 'spearman': the metrics of the task are loss, accuracy, macro_f1"),
        (["tokenizer=run"], "tokenizer = 'run': set train.init_from"),
        (
            ["data.train={kind='text', path='x'}"],
            "data.train.kind = 'text': the task classify needs labels: table, lines, folders, or text with a label",
        ),
    ],
)
def test_what_does_not_fit_together(tmp_path: Path, changes: list[str], line: str) -> None:
    recipe = labelled(tmp_path, Classify(), parities())
    with pytest.raises(ConfigError) as caught:
        make(io.override(recipe, changes), tmp_path / "run")
    assert any(line in found for found in str(caught.value).splitlines()), str(caught.value)


def test_labels_that_tell_nothing(tmp_path: Path) -> None:
    alike = labelled(tmp_path, Classify(), [(text, "x") for text, _ in parities()])
    assert told(alike, tmp_path) == ["data.train.label: has fewer than two labels: of 40 rows, all have the label 'x'"]
    alike = labelled(tmp_path, Regress(), [(a, b, "2") for a, b, _ in distances()], labels=1)
    assert told(alike, tmp_path) == ["data.train.label: does not vary: of 40 rows, all have the same number"]


def test_labels_may_be_given(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Classify(labels=("odd", "even")), parities(), steps=2)
    made = run(recipe, tmp_path / "run")
    assert isinstance(made.spec, Classify)
    assert made.spec.labels == ("odd", "even")
    fewer = io.override(recipe, ["task.labels=['odd','Even']"])
    assert "rows.tsv:2: the label 'even' does not occur" in told(fewer, tmp_path)[1].replace("rows.tsv:3", "rows.tsv:2")


def test_lines_to_answer_that_are_no_pairs(tmp_path: Path) -> None:
    made = run(labelled(tmp_path, Regress(), distances(), labels=1, steps=2), tmp_path / "run")
    assert len(made.predict(["1\t2", "", "3 4\t5"])) == 3
    with pytest.raises(ConfigError) as caught:
        made.predict(["1\t2", "3", "1\t2\t3", "\t1"])
    assert str(caught.value).splitlines() == [f"text {i}: must be two texts separated by a tab" for i in (2, 3, 4)]
    with pytest.raises(ConfigError, match="temperature: is for models that generate text"):
        made.predict(["1\t2"], temperature=1.0)
