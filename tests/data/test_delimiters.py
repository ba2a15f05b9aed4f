"""CSV with other delimiters and decimal commas: what is written is read, and messages name the delimiter."""

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from anyformer.recipe import Data, Recipe, TableFile
from anyformer.recipe.ready import read_recipe
from anyformer.recipe.source import source_faults
from anyformer.training.new_recipe.draft import RecipeRequest, draft
from anyformer.training.prepare import read_rows
from tests.data.source_files import ANY, faults, rows, write

pytestmark = pytest.mark.usefixtures("empty_folder")
DELIMITERS = [",", ";", "\t", "|"]
CELL = st.text(ANY, min_size=1, max_size=8).filter(lambda text: text.strip() and "\r" not in text)


@given(st.sampled_from([*DELIMITERS, "^", "글"]), st.lists(st.tuples(CELL, CELL), min_size=1, max_size=5))
@settings(max_examples=40)
def test_what_is_written_is_read(delimiter: str, made: list[tuple[str, str]]) -> None:
    with Path("t.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("a", "b"), *made])
    found = rows(TableFile(path="t.csv", source="a", target="b", delimiter=delimiter))
    assert [*zip(found.columns["source"], found.columns["target"], strict=True)] == made


def drafted(task: str, **columns: str) -> Recipe:
    """Return the recipe of `anyformer new` for t.csv."""
    made = draft(RecipeRequest(task, ["t.csv"], columns, None, False, False))  # type: ignore[arg-type]
    Path("t.toml").write_text(made.text(10), encoding="utf-8")
    return read_recipe("t.toml")


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp1252"])
@pytest.mark.parametrize("delimiter", DELIMITERS)
def test_new_finds_the_delimiter(delimiter: str, encoding: str, header: bool) -> None:
    """With quoted delimiters and line ends, as spreadsheets write them."""
    texts = [f"Größe {i} – “ok”; a, b | c\td\nund {i * i}" for i in range(60)]
    with Path("t.csv").open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows(
            [*([("Beschreibung", "Art")] if header else []), *((t, "xy"[i % 2]) for i, t in enumerate(texts))]
        )
    names = ("Beschreibung", "Art") if header else ("0", "1")
    recipe = drafted("classify", text=names[0], label=names[1])
    source = recipe.data.train
    assert isinstance(source, TableFile)
    assert source.delimiter == delimiter
    found = [text for part in read_rows(recipe).values() for text in part.columns["text"]]
    assert sorted(found) == sorted(texts)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_decimal_commas(delimiter: str) -> None:
    numbers = [f"{i // 10},{i % 10}" for i in range(1, 50)] + ["-1.234,5", "+7", "12"]
    lines = [f"ein Text {i}{delimiter}{number}" for i, number in enumerate(numbers)]
    write("t.csv", "\n".join([f"Text{delimiter}Preis", *lines]))
    recipe = drafted("regress")
    assert isinstance(recipe.data.train, TableFile)
    assert (recipe.data.train.delimiter, recipe.data.train.decimal) == (delimiter, ",")
    found = [float(label) for part in read_rows(recipe).values() for label in part.columns["label"]]
    assert sorted(found) == sorted(float(number.replace(".", "").replace(",", ".")) for number in numbers)


def test_commas_between_thousands_are_not_decimal() -> None:
    write("t.csv", "text\tprice\n" + "".join(f"text {i}\t{i + 1},000\n" for i in range(40)))
    source = drafted("regress").data.train
    assert isinstance(source, TableFile)
    assert source.decimal == "."


def test_a_label_without_a_decimal_comma_is_a_bad_row() -> None:
    source = TableFile(path=write("t.csv", "a;b\nx;3,5\ny;3.5\n"), text="a", label="b", delimiter=";", decimal=",")
    _, line = faults(source)
    assert line == "t.csv:3: the label '3.5' is no number with a decimal comma"


def test_messages_name_the_delimiter() -> None:
    path = write("t.csv", "Text;Art\na;1\nb,c;2;3\n")
    (line,) = faults(TableFile(path=path, text="Text"))
    assert line == (
        "data.train.text = 'Text': no such column in t.csv, separated by commas; known here: Text;Art; "
        'its first row has 1 semicolons: set delimiter = ";"'
    )
    (line,) = faults(TableFile(path=path, text=1))
    assert line.endswith(
        't.csv, separated by commas, has only column 0; its first row has 1 semicolons: set delimiter = ";"'
    )
    (_, line) = faults(TableFile(path=path, text="Text", label="Art", delimiter=";"))
    assert line == "t.csv:3: has 3 columns, the first row has 2, separated by semicolons"
    (line,) = faults(TableFile(path=path, format="tsv", text="Text"))
    assert line.endswith('set format = "csv" and delimiter = ";"')


def test_settings_that_nothing_reads_are_refused() -> None:
    (fault,) = source_faults(TableFile(path="t.tsv", text="a", delimiter=";"), "lm", ("text",))
    assert str(fault) == "delimiter = ';': is for CSV, and this is tsv"
    (fault,) = source_faults(TableFile(path="t.csv", text="a", label="b", decimal=","), "classify", ("text", "label"))
    assert str(fault) == "decimal = ',': is for numbers, which the task regress reads, and not classify"
    for wrong in ("", ";;", '"', "\n"):
        with pytest.raises(ValueError, match="delimiter"):
            Data.model_validate({"train": {"kind": "table", "path": "t.csv", "delimiter": wrong}})
