"""Parquet files come back; wrong ones are told."""

import sys

import pytest
from hypothesis import given

from anyformer.recipe import TableFile
from tests.data.source_files import QA, TABLE, faults, pairs, rows, write, write_parquet

pytestmark = pytest.mark.usefixtures("empty_folder")


@given(table=TABLE)
def test_parquet_takes_back_what_is_written(table: list[tuple[str, str]]) -> None:
    found = rows(TableFile(path=write_parquet("t.parquet", [{"Q": q, "A": a, "x": 1} for q, a in table]), **QA))
    assert pairs(found) == table
    assert [found.origin(i) for i in range(len(found))] == [f"t.parquet:{i + 1}" for i in range(len(table))]


def test_values_of_parquet() -> None:
    fields = [
        {"t": "a", "n": 1, "f": 0.5, "b": True, "l": ["x", "y"]},
        {"t": None, "n": 2, "f": 1e300, "b": False, "l": ["z"]},
        {"t": " ", "n": 3, "f": 2.0, "b": None, "l": []},
        {"t": "n\0l", "n": None, "f": -3.0, "b": None, "l": None},
    ]
    path = write_parquet("t.parquet", fields)
    assert rows(TableFile(path=path, text="n"), skip=True).columns == {"text": ["1", "2", "3"]}
    assert rows(TableFile(path=path, text="f")).columns == {"text": ["0.5", "1e+300", "2.0", "-3.0"]}
    assert [str(bad) for bad in rows(TableFile(path=path, text="t"), skip=True).bad] == [
        "t.parquet:2: the field 't' is null: must be a string or a number",
        "t.parquet:3: the text is empty",
        "t.parquet:4: holds a NUL character",
    ]
    assert "the field 'b' is true: must be a string or a number" in faults(TableFile(path=path, text="b"))[1]
    assert rows(TableFile(path=path, words="l", tags="l"), skip=True).columns["words"] == ["x\ny", "z"]


def test_whole_files_of_parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet("t.parquet", [{"question": {"text": "a"}}])
    at = "data.train"
    wrong = f"no such column in {path}"
    for source, expected in (
        (TableFile(path=path, text="qestion"), f"{at}.text = 'qestion': {wrong}; did you mean 'question'?"),
        (
            TableFile(path=path, text="question.txt"),
            f"{at}.text = 'question.txt': {wrong}: 'question' has no 'txt'; did you mean 'text'?",
        ),
        (TableFile(path=path, text="x", encoding="cp949"), f"{at}.encoding = 'cp949': text in Parquet is utf-8 always"),
        (TableFile(path=path, text="x", header=False), f"{at}.header = false: columns of Parquet have names always"),
        (TableFile(path=".", text="x", format="parquet"), f"{at}.path = '.': . is not a regular file"),
    ):
        assert faults(source) == [expected]
    (found,) = faults(TableFile(path=write("b.parquet", "no table at all"), text="x"))
    assert found.startswith(f"{at}: b.parquet is no Parquet file (")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    package = "is read by the package pyarrow: pip install 'anyformer[parquet]'"
    assert faults(TableFile(path=path, text="x")) == [f"{at}: {path} {package}"]
