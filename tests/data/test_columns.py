"""Columns of tables by number and joined, labels of whole files, comments and spaces in CoNLL."""

import csv
import io as text_io
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError, TokenLabels, io
from anyformer.recipe import Classify, ConllFile, JoinedSources, MatchedLines, Recipe, TableFile, TextFile
from tests.data.source_files import faults, rows, write, write_parquet
from tests.training.small import labelled, parities, run, tagging

pytestmark = pytest.mark.usefixtures("empty_folder")

CELL = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufeff"), min_size=1).filter(
    str.strip
)
ROWS = st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[CELL] * width), min_size=1, max_size=5))


def table(kind: str, cells: list[tuple[str, ...]], header: bool) -> str:
    """Writes cells as a file, with names c0, c1, ... in a header."""
    names = tuple(f"c{i}" for i in range(len(cells[0])))
    lines = [names, *cells] if header else cells
    if kind == "tsv":
        return write("t.tsv", "".join("\t".join(line) + "\n" for line in lines))
    if kind == "jsonl":
        made = [dict(zip(names, row, strict=True)) if header else row for row in cells]
        return write("t.jsonl", "".join(json.dumps(row) + "\n" for row in made))
    out = text_io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return write("t.csv", out.getvalue())


# -- by number --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl"])
@given(cells=ROWS, data=st.data())
def test_a_column_by_number_is_the_column_by_name(kind: str, cells: list[tuple[str, ...]], data: st.DataObject) -> None:
    """From 0, with a header and without one."""
    number = data.draw(st.integers(0, len(cells[0]) - 1))
    expected = [row[number] for row in cells]
    assert rows(TableFile(path=table(kind, cells, True), text=f"c{number}")).columns["text"] == expected
    if kind != "jsonl":
        assert rows(TableFile(path=table(kind, cells, True), text=number)).columns["text"] == expected
    without = table(kind, cells, False)
    for name in (number, str(number)):
        assert rows(TableFile(path=without, header=False, text=name)).columns["text"] == expected


def test_roles_and_groups_by_number() -> None:
    path = write("t.tsv", "a\t1\tx\nb\t2\ty\n")
    found = rows(TableFile(path=path, header=False, text=0, label=2, group=1))
    assert found.columns == {"text": ["a", "b"], "label": ["x", "y"]}
    words = rows(TableFile(path=write("w.csv", "A B,x y\n"), header=False, words=0, tags=1))
    assert words.columns == {"words": ["A\nB"], "tags": ["x\ny"]}


def test_numbers_out_of_range() -> None:
    path = write("t.tsv", "a\tb\n")
    source = TableFile(path=path, header=False, text=["0", 2], label=7)
    assert faults(source) == [
        "data.train.text.1 = 2: t.tsv, separated by tabs, has 2 columns, numbered from 0 to 1",
        "data.train.label = 7: t.tsv, separated by tabs, has 2 columns, numbered from 0 to 1",
    ]
    one = TableFile(path=write("o.tsv", "a\n"), header=False, text=1)
    assert faults(one) == ["data.train.text = 1: o.tsv, separated by tabs, has only column 0"]


# -- joined -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tsv", "csv", "jsonl"])
@given(cells=ROWS, data=st.data(), between=st.sampled_from([" ", "", " [SEP] ", "나"]))
def test_joined_columns_are_the_single_ones(
    kind: str, cells: list[tuple[str, ...]], data: st.DataObject, between: str
) -> None:
    names = data.draw(st.lists(st.sampled_from([f"c{i}" for i in range(len(cells[0]))]), min_size=1))
    path = table(kind, cells, True)
    single = [rows(TableFile(path=path, text=name)).columns["text"] for name in names]
    joined = rows(TableFile(path=path, text=names, join=between)).columns["text"]
    assert joined == [between.join(row) for row in zip(*single, strict=True)]


def test_blank_cells_are_left_out() -> None:
    path = write("t.tsv", "title\tbody\na\tb\n\tc\nd\t \n")
    assert rows(TableFile(path=path, text=["title", "body"], join=": ")).columns["text"] == ["a: b", "c", "d"]
    write("t.tsv", "title\tbody\na\tb\n\t \n")
    assert faults(TableFile(path=path, text=["title", "body"]))[1] == "t.tsv:3: the text is empty"


def test_joined_columns_of_parquet() -> None:
    path = write_parquet("t.parquet", [{"a": {"x": "제목"}, "b": 3}])
    assert rows(TableFile(path=path, text=["a.x", "b"])).columns["text"] == ["제목 3"]
    assert faults(TableFile(path=path, text=["a.x", "c"]))[0].startswith("data.train.text.1 = 'c': no such column")


# -- labels of whole files --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["좋다", "나쁘다"]), CELL), min_size=1, max_size=8))
def test_one_file_per_label(drawn: list[tuple[str, str]]) -> None:
    """As `text`, as `lines` and as a table of both, the same rows."""
    labels = list(dict.fromkeys(label for label, _ in drawn))
    expected = sorted(drawn)
    for label in labels:
        write(f"{label}.txt", "".join(f"{text}\n" for own, text in drawn if own == label))
    parts = [
        [TextFile(path=f"{label}.txt", document="line", label=label) for label in labels],
        [MatchedLines(path=f"{label}.txt", pattern="(?P<text>.*)", label=label) for label in labels],
    ]
    for each in parts:
        found = rows(JoinedSources(parts=tuple(each)))
        assert sorted(zip(found.columns["label"], found.columns["text"], strict=True)) == expected


def test_a_label_per_file_trains(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Classify(), parities(), steps=2)
    for label in ("even", "odd"):
        write(f"{label}.txt", "".join(f"{text}\n" for text, own in parities() if own == label))
    part = "{{kind='text', path='{0}.txt', document='line', label='{0}'}}"
    parts = ", ".join(part.format(label) for label in ("even", "odd"))
    changed = io.override(recipe, [f"data.train={{kind='joined', parts=[{parts}]}}"])
    assert run(changed, tmp_path / "run").task.spec.labels == ("even", "odd")  # type: ignore[union-attr]


# -- recipes ----------------------------------------------------------------------------------------------------------

WRONG = {
    "{kind='table', path='a.jsonl', text=['t', 1], label=0}": [
        ".text.1 = 1: lines of JSON have names: give them, or set header = false for JSON lists",
        ".label = 0: lines of JSON have names: give them, or set header = false for JSON lists",
    ],
    "{kind='table', path='a.parquet', text='t', label=0}": [".label = 0: columns of Parquet have names: give them"],
    "{kind='table', path='a.tsv', text=-1, label=0}": [".text = -1: must be a string or at least 0 or a list"],
    "{kind='table', path='a.tsv', text=[], label=0}": None,
    "{kind='table', path='a.tsv', text='t', label=['a', 'b']}": [
        ".label = ['a', 'b']: must be a string or a whole number"
    ],
    "{kind='table', path='a.tsv', text='t', label='l', join=', '}": [
        ".join = ', ': is for a list of columns, such as text = ['title', 'body']"
    ],
    "{kind='text', path='a'}": [
        ".kind = 'text': the task classify needs labels: table, lines, folders, or text with a label"
    ],
    "{kind='text', path='a', label=''}": None,
    "{kind='lines', path='a', pattern='(?P<text>.*) (?P<label>.)', label='x'}": [
        ".pattern = '(?P<text>.*) (?P<label>.)': has the group (?P<label>...), and label = 'x' is set: "
        "leave out one of them"
    ],
    "{kind='lines', path='a', pattern='(?P<text>.*)'}": [
        ".pattern = '(?P<text>.*)': needs the named groups (?P<label>...)"
    ],
}


@pytest.mark.parametrize("source", WRONG)
def test_wrong_sources_are_faults_of_the_recipe(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        io.override(labelled(tmp_path, Classify(), parities()), [f"data.train={source}"])
    if (expected := WRONG[source]) is not None:
        assert [str(fault) for fault in error.value.faults] == [f"data.train{why}" for why in expected]


def test_a_label_without_a_use_is_refused(tmp_path: Path) -> None:
    from anyformer.recipe.ready import read_recipe

    for source in ("{kind='text', path='a', label='x'}", "{kind='lines', path='a', pattern='(?P<text>.*)', label='x'}"):
        with pytest.raises(ConfigError, match=r"^data\.train\.label = 'x': the task lm reads no labels: leave it out$"):
            read_recipe("shakespeare", [f"data.train={source}"])


def test_recipes_keep_columns(tmp_path: Path) -> None:
    """Names, numbers and lists are written and read back as they are."""
    change = "data.train={kind='table', path='a.tsv', text=['t', 2], label=0, group=1}"
    recipe = io.override(labelled(tmp_path, Classify(), parities()), [change])
    for format in ("toml", "json"):
        assert io.loads(Recipe, io.dumps(recipe, format), format) == recipe
    assert io.override(recipe, ["data.train.text.1=body"]).data.train.text == ("t", "body")  # type: ignore[union-attr]


# -- CoNLL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["\t", " "])
@given(
    sentences=st.lists(st.lists(st.sampled_from(["a", "#b", "가"]), min_size=1), min_size=1),
    comments=st.lists(st.sampled_from(["%", "%% x", "% a\tO", "% # y z"]), max_size=4),
    data=st.data(),
)
def test_comments_change_nothing(
    separator: str, sentences: list[list[str]], comments: list[str], data: st.DataObject
) -> None:
    lines = [line for words in sentences for line in (*(f"{word}{separator}O" for word in words), "")]
    expected = [" ".join(words) for words in sentences]
    assert rows(ConllFile(path=write("w.conll", "\n".join(lines)))).columns["text"] == expected
    for comment in comments:
        lines.insert(data.draw(st.integers(0, len(lines))), comment)
    write("w.conll", "\n".join(lines))
    source = ConllFile(path="w.conll", comment="%", separator="tab" if separator == "\t" else "spaces")
    assert rows(source).columns["text"] == expected


def test_a_word_may_be_a_space(tmp_path: Path) -> None:
    path = write("w.conll", "New\tB-x\n \tI-x\nYork\tI-x\n\n \tO\n\u3000\tO\n")
    found = rows(ConllFile(path=path))
    assert [words.split("\n") for words in found.columns["words"]] == [["New", " ", "York"], [" ", "\u3000"]]
    assert faults(ConllFile(path=write("w.conll", "a\tO\n\tO\n")))[1] == "w.conll:2: the word is empty"
    assert faults(ConllFile(path=write("w.conll", "a\tO\nb\t \tO\n"), tag=1))[1:] == [
        "w.conll:2: the tag is empty",
    ]
    sentences = [[("a", "x"), (" ", "y"), ("b", "x")], [(" ", "y")]] * 4
    made = run(tagging(tmp_path, rows=sentences, head=TokenLabels(labels="auto"), steps=2), tmp_path / "run")
    assert len(made.predict(["a\t \tb"])[0].split("\t")) == 3
