"""Files come back whole, line by line, from where they are looked for."""

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.readers import read
from anyformer.recipe import (
    ConllFile,
    Data,
    JoinedSources,
    MatchedLines,
    ParallelFiles,
    TableFile,
    TextFile,
    source_faults,
)
from tests.data.source_files import ANY, TABLE, faults, pairs, rows, write, write_parquet

pytestmark = pytest.mark.usefixtures("empty_folder")

TRAPS = ["a\u2028b", "c\x0bd", "e\x0cf", "g\x85h", "i\x1cj", "  k  ", 'l "m', "n\rp"]  # one line each
KOREAN = [("안녕하세요", "반갑습니다."), ("12시 땡!", "하루가 또 가네요."), ("똠방각하", "펲시")]


# -- every line comes back --------------------------------------------------------------------------------------------

CELL = st.text(ANY.filter(lambda c: c not in "\n\r\t"), min_size=1).filter(str.strip)


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@given(lines=st.lists(CELL, min_size=1), last=st.booleans())
def test_every_line_comes_back(gz: str, newline: str, lines: list[str], last: bool) -> None:
    text = newline.join(lines) + (newline if last else "")
    one, other = write(f"one.txt{gz}", text), write(f"other.txt{gz}", text.upper())
    documents = rows(TextFile(path=one, document="line"))
    assert documents.columns == {"text": lines}
    assert [documents.origin(i) for i in range(len(documents))] == [f"{one}:{i + 1}" for i in range(len(lines))]
    assert rows(ParallelFiles(source=one, target=one)).columns == {"source": lines, "target": lines}
    assert rows(MatchedLines(path=one, pattern="(?s)(?P<text>.*)")).columns == {"text": lines}
    assert rows(TableFile(path=one, text="0", header=False, format="tsv")).columns == {"text": lines}
    assert rows(TextFile(path=one)).columns == {"text": [text.replace("\r\n", "\n")]}
    assert len(rows(ParallelFiles(source=one, target=other))) == len(lines)


def test_a_line_ends_at_a_newline_only() -> None:
    path = write("traps.txt", "\n".join(TRAPS))
    assert rows(TextFile(path=path, document="line")).columns["text"] == TRAPS
    assert pairs(rows(ParallelFiles(source=path, target=path))) == [(trap, trap) for trap in TRAPS]
    table = write("traps.jsonl", "\n".join(json.dumps({"text": trap}, ensure_ascii=False) for trap in TRAPS))
    assert rows(TableFile(path=table, text="text")).columns["text"] == TRAPS


def test_empty_lines_are_no_rows_except_in_parallel_files() -> None:
    assert rows(TextFile(path=write("a.txt", "\none\n \n\ntwo\n\n"), document="line")).columns["text"] == ["one", "two"]
    assert pairs(rows(TableFile(path=write("a.csv", "Q,A\n\n1,2\n\n"), source="Q", target="A"))) == [("1", "2")]
    assert pairs(rows(TableFile(path=write("a.tsv", "Q\tA\n\n1\t2\n"), source="Q", target="A"))) == [("1", "2")]
    assert rows(TableFile(path=write("a.jsonl", '\n{"t": 1}\n\n'), text="t")).lines == [2]
    assert rows(MatchedLines(path=write("b.txt", "\nx\n"), pattern="(?P<text>.*)")).lines == [2]


@pytest.mark.parametrize(("end", "quoting"), [("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)])
@given(table=TABLE)
def test_csv_takes_back_what_csv_writes(end: str, quoting: Any, table: list[tuple[str, str]]) -> None:
    """Quotes, commas and ends of lines inside a cell included, and rows know the line they begin in."""
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator=end, quoting=quoting).writerows([("Q", "A"), *table])
    path = write("table.csv", file.getvalue())
    found = rows(TableFile(path=path, source="Q", target="A"))
    assert pairs(found) == table
    begins = [2 + sum(cell.count("\n") for row in table[:i] for cell in row) + i for i in range(len(table))]
    assert list(found.lines) == begins
    headless = TableFile(path=path, source="0", target="1", header=False)
    assert pairs(rows(headless)) == [("Q", "A"), *table]


def test_a_long_cell_of_csv_is_read() -> None:
    limit = csv.field_size_limit()
    assert len(rows(TableFile(path=write("a.csv", f"t\n{'x' * 200_000}\n"), text="t")).columns["text"][0]) == 200_000
    assert csv.field_size_limit() == limit


@given(table=TABLE, ascii_only=st.booleans())
def test_jsonl_takes_back_what_json_writes(table: list[tuple[str, str]], ascii_only: bool) -> None:
    lines = [json.dumps({"Q": q, "x": [1], "A": a}, ensure_ascii=ascii_only) for q, a in table]
    found = rows(TableFile(path=write("table.jsonl.gz", "\n".join(lines)), source="Q", target="A"))
    assert pairs(found) == table
    path = write("lists.jsonl", "\n".join(json.dumps([q, None, a], ensure_ascii=ascii_only) for q, a in table))
    assert pairs(rows(TableFile(path=path, source="0", target="2", header=False))) == table


def test_numbers_of_json_stay_as_they_are_written() -> None:
    path = write("n.jsonl", '{"t": 1.50}\n{"t": 1e400}\n{"t": ' + "7" * 5000 + "}")
    assert rows(TableFile(path=path, text="t")).columns["text"] == ["1.50", "1e400", "7" * 5000]


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl", "TSV", "tsv.gz", "csv.gz", "jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp949", "utf-16", "utf-32-be", "johab"])
def test_korean_in_every_table_and_encoding(suffix: str, encoding: str) -> None:
    given = [pair for pair in KOREAN if "똠" not in pair[0] or encoding != "johab"]
    form = suffix.lower().removesuffix(".gz")
    if form == "jsonl":
        lines = [json.dumps({"Q": q, "A": a}, ensure_ascii=False) for q, a in given]
    else:
        lines = [("," if form == "csv" else "\t").join(pair) for pair in [("Q", "A"), *given]]
    path = write(f"table.{suffix}", "\r\n".join(lines), encoding)
    name = encoding.removesuffix("-sig")  # a mark at the beginning is dropped without being asked
    assert pairs(rows(TableFile(path=path, source="Q", target="A", encoding=name))) == given
    sources = write("sources.txt", "\n".join(q for q, _ in given), encoding)
    targets = write("targets.txt", "\n".join(a for _, a in given), encoding)
    assert pairs(rows(ParallelFiles(source=sources, target=targets, encoding=name))) == given


def test_columns_that_are_named_are_read_and_no_others() -> None:
    path = write("t.csv", "a,b,c\n1,2,3\n")
    assert rows(TableFile(path=path, text="b")).columns == {"text": ["2"]}
    everything = {"source": ["3"], "target": ["1"], "text": ["2"]}
    assert rows(TableFile(path=path, source="c", target="a", text="b")).columns == everything
    found = rows(MatchedLines(path=write("scan.txt", "IN: a OUT: b"), pattern="IN: (?P<source>.*) OUT: (?P<target>.*)"))
    assert pairs(found) == [("a", "b")]


# -- columns within columns -------------------------------------------------------------------------------------------

NESTED: list[tuple[dict[str, Any], str, str]] = [
    ({"meta": {"title": "x"}}, "meta.title", "x"),
    ({"translations": [{"text": "x"}, {"text": "y"}]}, "translations.1.text", "y"),
    ({"meta.title": "x", "meta": {"title": "y"}}, "meta.title", "x"),
    ({"a": {"b.c": "x", "b": {"c": "y"}}}, "a.b.c", "x"),
    ({"a.b": {"d": "x"}, "a": {"b": {"c": "y"}}}, "a.b.c", "y"),
    ({"a": [["x", "y"]]}, "a.0.1", "y"),
    ({"": {"": "x"}}, ".", "x"),
]


@pytest.mark.parametrize(("fields", "path", "expected"), NESTED)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_column_may_lie_within_another(form: str, fields: dict[str, Any], path: str, expected: str) -> None:
    """A field whose own name has the dot goes before a path."""
    name = f"t.{form}"
    if form == "jsonl":
        write(name, json.dumps(fields))
    else:
        write_parquet(name, [fields])
    assert rows(TableFile(path=name, text=path)).columns == {"text": [expected]}


def test_what_a_path_does_not_find() -> None:
    lines = [{"meta": {"title": "a", "n": [1]}}, {"meta": {"titles": "b"}}, {"meta": None}, {}, {"meta": {"title": 2}}]
    path = write("t.jsonl", "\n".join(map(json.dumps, lines)))
    source = TableFile(path=path, text="meta.title")
    assert rows(source, skip=True).columns == {"text": ["a", "2"]}
    assert [str(bad) for bad in rows(source, skip=True).bad] == [
        "t.jsonl:2: has no field 'meta.title': 'meta' has no 'title'",
        "t.jsonl:3: has no field 'meta.title': 'meta' has no 'title'",
        "t.jsonl:4: has no field 'meta.title'",
    ]
    wrong = "no such column in t.jsonl"
    for name, expected in (
        ("meta.titel", f"{wrong}: 'meta' has no 'titel'; did you mean 'title'?"),
        ("mata.title", f"{wrong}; did you mean 'meta'?"),
        ("meta.n.1", f"{wrong}: 'meta.n' has no '1'; known here: 0"),
        ("meta.title.x", f"{wrong}: 'meta.title' has no 'x'; nothing lies within it"),
    ):
        assert faults(TableFile(path=path, text=name)) == [f"data.train.text = {name!r}: {expected}"]


# -- parts of a text --------------------------------------------------------------------------------------------------


@given(
    text=st.text(st.sampled_from("ab \n가\u2028"), min_size=1).filter(lambda text: text.strip()),
    cuts=st.lists(st.floats(0.001, 0.999), max_size=4),
)
def test_parts_cover_a_text_and_do_not_overlap(text: str, cuts: list[float]) -> None:
    path = write("text.txt", text)
    edges = sorted({0.0, *cuts, 1.0})
    together: dict[str, list[str]] = {"file": [], "line": []}
    numbers = []
    for start, stop in itertools.pairwise(edges):
        for document, parts in together.items():
            part = TextFile(path=path, document=document, start=start, stop=stop)
            expected = text[int(len(text) * start) : int(len(text) * stop)]
            try:
                found = rows(part)
            except ConfigError:  # nothing but blanks, or no beginning of a line
                parts += [expected] if document == "file" and not expected.strip() else []
                continue
            parts += found.columns["text"]
            numbers += list(found.lines) if document == "line" else []
    assert "".join(together["file"]) == text
    assert together["line"] == [line for line in text.split("\n") if line.strip()]
    assert numbers == sorted(set(numbers))
    assert rows(TextFile(path=write("text.txt", "one\ntwo\nthree\n"), start=0.5)).origin(0) == "text.txt:2"


# -- where files are --------------------------------------------------------------------------------------------------


def test_root_then_environment_then_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("root", "environment", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.txt").write_text(folder)
    source = TextFile(path="a.txt")
    assert rows(source).columns["text"] == ["."]
    monkeypatch.setenv("ANYFORMER_DATA", str(tmp_path / "environment"))
    assert rows(source).columns["text"] == ["environment"]
    assert rows(source, root="root").columns["text"] == ["root"]
    assert rows(TextFile(path=str(tmp_path / "a.txt")), root="root").columns["text"] == ["."]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rows(TextFile(path="~/root/a.txt")).columns["text"] == ["root"]
    assert rows(source, root="~/environment").columns["text"] == ["environment"]


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TextFile(path="sub/trian.en")
    told = "set data.root to the folder where relative paths begin"
    at = f"data.train.path = 'sub/trian.en': no file {tmp_path}"
    assert faults(source) == [f"{at}/sub/trian.en; {told} (now it is the current folder)"]
    assert faults(source, root="d") == [f"{at}/d/sub/trian.en; {told} (now it is 'd')"]
    monkeypatch.setenv("ANYFORMER_DATA", f"{tmp_path}/e")
    by = f"'{tmp_path}/e', by the environment variable ANYFORMER_DATA"
    assert faults(source) == [f"{at}/e/sub/trian.en; {told} (now it is {by})"]
    (tmp_path / "e" / "sub").mkdir(parents=True)
    (tmp_path / "e" / "sub" / "train.en").touch()
    assert faults(source)[0].endswith("; did you mean 'train.en'?")
    gone = f"{tmp_path}/gone"
    assert faults(TextFile(path=gone)) == [f"data.train.path = '{gone}': no file {gone}"]
    both = faults(ParallelFiles(source=gone, target=gone, encoding="utf-9"))
    assert [line.split(" ")[0] for line in both] == ["data.train.encoding", "data.train.source", "data.train.target"]


# -- several sources --------------------------------------------------------------------------------------------------


def test_joined_sources_keep_where_each_row_is_from(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    (tmp_path / "b.tsv").write_text("label\ttext\nx\tthree\nx\t\n", encoding="utf-8")
    (tmp_path / "c.conll").write_text("four X\nfive Y\n", encoding="utf-8")
    parts = (
        TextFile(path="a.txt", document="line"),
        TableFile(path="b.tsv", text="text", label="label"),
        ConllFile(path="c.conll"),
    )
    source = JoinedSources(parts=parts)
    data = Data(train=source, root=str(tmp_path), on_bad_row="skip")
    rows = read(source, data, "train", 0)
    assert rows.columns == {"text": ["one", "two", "three", "four five"]}
    origins = [Path(rows.origin(i)).name for i in range(4)]
    assert origins == ["a.txt:1", "a.txt:3", "b.tsv:2", "c.conll:1"]
    assert [Path(str(bad)).name for bad in rows.bad] == ["b.tsv:3: the text is empty"]
    left = rows.without({1: "is bad"})
    assert [Path(left.origin(i)).name for i in range(3)] == [origins[0], *origins[2:]]


def test_a_part_of_joined_sources_is_told_by_its_number(tmp_path: Path) -> None:
    source = JoinedSources(parts=(TextFile(path="no.txt"),))
    with pytest.raises(ConfigError, match=r"data\.train\.parts\.0\.path"):
        read(source, Data(train=source, root=str(tmp_path)), "train", 0)
    assert [str(fault) for fault in source_faults(source, "seq2seq", ("source", "target"))] == [
        "parts.0.kind = 'text': the task seq2seq needs pairs: parallel, table or lines"
    ]
