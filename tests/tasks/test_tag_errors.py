"""Tagging: sentences and recipes that are refused, one line each."""

from pathlib import Path
from typing import Any

import pytest

from anyformer.config import LM, ConfigError, TokenLabels, io
from anyformer.recipe import Recipe
from tests.tasks.refused import told
from tests.training.small import PACKED, PADDED, evens, pairs, tagging

CRF = TokenLabels(labels=3, crf=True)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"w": ["1", "2"], "t": ["O"]}', "has 2 words and 1 tag"),
        (
            '{"w": ["1", "2"], "t": ["O", "B-evn"]}',
            "word 2, '2': the tag 'B-evn' does not occur in training: did you mean 'B-even'?",
        ),
        ('{"w": ["1", ""], "t": ["O", "O"]}', "word 2 is empty"),
        ('{"w": ["1"], "t": [""]}', "the tags are empty"),
        ('{"w": [], "t": []}', "the words are empty"),
    ],
)
def test_bad_sentences(tmp_path: Path, row: str, why: str) -> None:
    recipe = tagging(tmp_path)
    (tmp_path / "valid.jsonl").write_text('{"w": "1 2", "t": "O B-even"}\n' + row, encoding="utf-8")
    table = {"kind": "table", "path": str(tmp_path / "valid.jsonl"), "words": "w", "tags": "t"}
    recipe = recipe.model_copy(
        update={"data": io.build(type(recipe.data), {**io.to_data(recipe.data), "valid": table})}
    )
    first, second = told(recipe, tmp_path)
    assert first.startswith("data.valid: 1 bad row and 1 good")
    assert second == f"{tmp_path / 'valid.jsonl'}:2: {why}"


def test_sentences_that_are_too_long(tmp_path: Path) -> None:
    rows = [*evens(10), [("1", "O")] * 40]
    for batches, kind, room in ((PADDED, "padded", 64), (PACKED, "packed", 32)):
        lines = told(tagging(tmp_path, rows=rows, batches=batches), tmp_path)
        assert lines[1].endswith(f"has 81 tokens, and a {kind} row holds {room}")


REFUSED: dict[str, dict[str, Any]] = {
    "model.head = 'lm': the task tag needs 'token_labels'": {"model.head": LM()},
    "batches.kind = 'crops': the task tag reads sentences: use 'padded' or 'packed'": {
        "batches": {"kind": "crops", "rows": 2, "length": 8}
    },
    "batches.kind = 'packed': a CRF reads one sentence per row: use 'padded', or model.head.crf = false": {
        "model.head": CRF,
        "batches": PACKED,
    },
    "train.label_smoothing = 0.1: a CRF has no loss per word; set it to 0, or model.head.crf = false": {
        "model.head": CRF,
        "train.label_smoothing": 0.1,
    },
    "train.best = 'macro_f1': the metrics of the task are loss, accuracy, span_f1": {"train.best": "macro_f1"},
    "data.train.kind = 'text': the task tag needs words with tags: conll or table": {
        "data.train": {"kind": "text", "path": "x"}
    },
    "data.train.kind = 'lines': the task tag needs words with tags: conll or table": {
        "data.train": {"kind": "lines", "path": "x", "pattern": "(?P<words>.*)"}
    },
    "data.train: the task tag needs the columns `words` and `tags`": {
        "data.train": {"kind": "table", "path": "x.tsv", "words": "w"}
    },
    "data.train.tag = 1: is also the column of the word": {
        "data.train": {"kind": "conll", "path": "x", "word": 1, "tag": 1}
    },
}


@pytest.mark.parametrize("line", REFUSED)
def test_parts_that_do_not_fit(tmp_path: Path, line: str) -> None:
    data = io.to_data(tagging(tmp_path))
    for path, value in REFUSED[line].items():
        *parents, last = path.split(".")
        at = data
        for name in parents:
            at = at[name]
        at[last] = io.to_data(value) if not isinstance(value, str | float | dict) else value
    with pytest.raises(ConfigError) as caught:
        io.build(Recipe, data)
    assert line in str(caught.value).splitlines()


def test_other_tasks_spell_no_words_and_read_none(tmp_path: Path) -> None:
    data = io.to_data(pairs("decoder"))
    data["model"]["target"]["spelling"] = {"kind": "bytes"}
    data["data"]["train"] = {"kind": "conll", "path": "x"}
    with pytest.raises(ConfigError) as caught:
        io.build(Recipe, data)
    lines = str(caught.value).splitlines()
    what = "the task seq2seq reads texts; only the task tag reads single words"
    assert f"model.target.spelling = 'bytes': {what}" in lines
    assert "data.train.kind = 'conll': the task seq2seq needs pairs: parallel, table or lines" in lines


def test_labels_and_what_measures_them(tmp_path: Path) -> None:
    assert told(tagging(tmp_path, head=TokenLabels(labels=4)), tmp_path) == [
        "model.head.labels = 4: the task has 3 labels: B-even, I-even, O"
    ]
    plain = [[(word, tag[0].lower()) for word, tag in row] for row in evens()]
    assert told(tagging(tmp_path, rows=plain, best="span_f1"), tmp_path)[0].startswith(
        "train.best = 'span_f1': the labels mark no spans"
    )
