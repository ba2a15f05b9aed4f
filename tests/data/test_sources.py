"""Files come back whole, line by line; what cannot be read is told by file and line, all of it at once."""

import csv
import gzip
import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.sources import Rows, read
from anyformer.recipe import (
    ConllFile,
    Data,
    Joined,
    MatchedLines,
    ParallelFiles,
    SortDigits,
    Source,
    TableFile,
    TextFile,
)
from anyformer.sources import misfits

TRAPS = ["a\u2028b", "c\x0bd", "e\x0cf", "g\x85h", "i\x1cj", "  k  ", 'l "m', "n\rp"]  # one line each
QA = {"source": "Q", "target": "A"}
KOREAN = [("안녕하세요", "반갑습니다."), ("12시 땡!", "하루가 또 가네요."), ("똠방각하", "펲시")]


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Relative paths begin in an empty folder, whatever the machine has set."""
    monkeypatch.delenv("ANYFORMER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def rows(source: Source, skip: bool = False, **more: Any) -> Rows:
    data = Data(train=source, on_bad_row="skip" if skip else "error", **more)
    return read(source, data, "train", 0)


def faults(source: Source, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        rows(source, **more)
    return str(error.value).splitlines()


def write(name: str, content: str | bytes, encoding: str = "utf-8") -> str:
    raw = content if isinstance(content, bytes) else content.encode(encoding)
    Path(name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return name


def pairs(found: Rows) -> list[tuple[str, str]]:
    return list(zip(found.columns["source"], found.columns["target"], strict=True))


# -- every line comes back --------------------------------------------------------------------------------------------

ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")
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


TABLE = st.lists(st.tuples(*[st.text(ANY, min_size=1).filter(str.strip)] * 2), min_size=1)


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


# -- Parquet ----------------------------------------------------------------------------------------------------------


def write_parquet(name: str, fields: list[dict[str, Any]]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(fields), name)
    return name


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


# -- what is wrong with a whole file ----------------------------------------------------------------------------------


def test_whole_files(tmp_path: Path) -> None:
    table = write("t.csv", "question,answer,answer\n1,2,3\n")
    for source, expected in (
        (TextFile(path="."), "data.train.path = '.': . is not a regular file"),
        (TextFile(path="/dev/null"), "data.train.path = '/dev/null': /dev/null is not a regular file"),
        (TextFile(path="a\0b"), "data.train.path = 'a\\x00b': cannot be the name of a file (embedded null byte)"),
        (TextFile(path="x" * 300), f"data.train.path = '{'x' * 300}': {'x' * 300} cannot be read (File name too long)"),
        (TextFile(path=write("empty.txt", "")), "data.train: no rows in empty.txt"),
        (TextFile(path=write("blank.txt", " \n\n")), "data.train: no rows in blank.txt"),
        (TableFile(path=write("header.csv", "a,b\n"), text="a"), "data.train: no rows in header.csv"),
        (
            ParallelFiles(source=write("3.en", "a\nb\nc\n"), target=write("2.de", "a\n\n")),
            "data.train: 3.en has 3 lines, 2.de has 2: parallel files must have as many lines each",
        ),
        (
            TableFile(path=table, source="qestion", target="answer"),
            "data.train.source = 'qestion': no such column in t.csv; did you mean 'question'?\n"
            "data.train.target = 'answer': 2 columns of t.csv have this name",
        ),
        (
            TableFile(path=table, text="3", header=False),
            "data.train.text = '3': no such column in t.csv; known here: 0, 1, 2",
        ),
        (
            TableFile(path=write("t.jsonl", '{"question": 1}\n{"answer": 2}'), text="anser"),
            "data.train.text = 'anser': no such column in t.jsonl; did you mean 'answer'?",
        ),
        (TableFile(path=table), "data.train: names no column: give `source` and `target`, or `text`"),
        (
            TableFile(path="t.txt", text="a"),
            "data.train.format: cannot be told from the name 't.txt': must be 'tsv', 'csv', 'jsonl' or 'parquet'",
        ),
        (
            TableFile(path=write("h.tsv", b"a\xff\tb\n1\t2\n"), text="b"),
            "data.train.path: the header cannot be read: h.tsv:1: byte 0xff is not utf-8; set `encoding`",
        ),
        (TextFile(path=table, encoding="utf-9"), "data.train.encoding = 'utf-9': unknown; did you mean 'utf-8'?"),
        (
            TextFile(path=table, encoding="hex"),
            "data.train.encoding = 'hex': unknown; Python's names are right, such as utf-8, latin-1, cp949",
        ),
    ):
        assert "\n".join(faults(source)) == expected
        if "no rows" not in expected:
            assert "\n".join(faults(source, skip=True)) == expected, "skipping is for rows"


def test_a_broken_archive() -> None:
    whole = gzip.compress(b"one\ntwo\n" * 100)
    for raw in (b"no archive", whole[:-9], whole[:20] + b"\xff\xff" + whole[22:]):
        Path("a.txt.gz").write_bytes(raw)
        assert "a.txt.gz is not a whole gzip file (" in faults(TextFile(path="a.txt.gz"))[0]


# -- bad rows ---------------------------------------------------------------------------------------------------------


def in_lines(encoding: str) -> TextFile:
    return TextFile(path="f", document="line", encoding=encoding)


BAD: list[tuple[Source, bytes, list[str]]] = [
    (
        in_lines("utf-8"),
        b"ok\nb\xffd\n\ng\0d\nok",
        ["2: byte 0xff is not utf-8; set `encoding`", "4: holds a NUL character"],
    ),
    (in_lines("utf-8"), b"ok\n\xed\xa0\x80\nok", ["2: byte 0xed is not utf-8; set `encoding`"]),
    (TextFile(path="f"), b"ok\nb\xffd\nok", ["2: byte 0xff is not utf-8; set `encoding`"]),
    (in_lines("cp949"), b"ok\n\xb0\nok", ["2: byte 0xb0 is not cp949; set `encoding`"]),
    (in_lines("euc_jp"), b"ok\n\x8f\xb0\nok", ["2: byte 0x8f is not euc_jp; set `encoding`"]),
    (in_lines("utf-16-le"), b"o\0\n\0\0\xdcx\0\n\0o\0", ["2: byte 0x00 is not utf-16-le; set `encoding`"]),
    (ParallelFiles(source="f", target="f"), b"ok\n \nok\n", ["2: the source is empty"]),
    (MatchedLines(path="f", pattern="(?P<text>o.?)"), b"ok\nok ", ["2: does not match the pattern: 'ok '"]),
    (MatchedLines(path="f", pattern="(?P<text>o)?.*"), b"o\nno", ["2: the text is empty"]),
    (
        TableFile(path="f", format="tsv", **QA),
        b"Q\tA\n1\t2\n1\n1\t2\t3\n\t2\n1\t \n1\t\xff\nok\tok",
        [
            "3: has 1 columns, the first row has 2",
            "4: has 3 columns, the first row has 2",
            "5: the source is empty",
            "6: the target is empty",
            "7: byte 0xff is not utf-8; set `encoding`",
        ],
    ),
    (
        TableFile(path="f", format="csv", **QA),
        b'Q,A\n"1\n",2\n"1"x,2\n1\rx,2\n"",2\n1,"2\xff\n"\n1,"never\n1,2\n',
        [
            "4: not valid CSV: ',' expected after '\"'",
            "5: a carriage return stands outside quotes",
            "6: the source is empty",
            "7: byte 0xff is not utf-8; set `encoding`",
            "9: a quote is opened and never closed",
        ],
    ),
    (
        TableFile(path="f", format="jsonl", **QA),
        b'{"Q": 1, "A": "x"}\n{"Q": 1}\n{"Q": 1, "A": true}\n{"Q": null, "A": 1}\n{"Q": 1, "A": "\\ud800"}\n',
        [
            "2: has no field 'A'",
            "3: the field 'A' is true: must be a string or a number",
            "4: the field 'Q' is null: must be a string or a number",
            "5: holds the lone surrogate U+D800",
        ],
    ),
    (
        TableFile(path="f", format="jsonl", **QA),
        b'{"Q": 1, "A": "\\u0000"}\n{"Q": 1,}\n[1, 2]\n{"Q": NaN, "A": 1}\n{"Q": 1, "A": [{}]}\n{"Q": 1, "A": 2}',
        [
            "1: holds a NUL character",
            "2: not valid JSON: Expecting property name enclosed in double quotes at column 9",
            "3: not a JSON object",
            "4: not valid JSON: NaN is no JSON",
            "5: the field 'A' is [{}]: must be a string or a number",
        ],
    ),
    (
        TableFile(path="f", format="jsonl", text="0", header=False),
        b'["a"]\n{"0": 1}\n[]',
        ["2: not a JSON list", "3: has no field '0'"],
    ),
]


@pytest.mark.parametrize(("source", "content", "expected"), BAD)
def test_bad_rows(source: Source, content: bytes, expected: list[str]) -> None:
    write("f", content)
    head, *told = faults(source)
    assert told == [f"f:{line}" for line in expected]
    found = rows(source, skip=True)
    assert [str(bad) for bad in found.bad] == told
    assert len(found) > 0
    assert not {bad.line for bad in found.bad} & set(found.lines)
    noun = "row" if len(expected) == 1 else "rows"
    assert head == (
        f"data.train: {len(expected)} bad {noun} beside {len(found)} good: mend them, or leave them out by "
        'data.on_bad_row = "skip"'
    )


def test_the_target_is_bad_in_its_own_file() -> None:
    source = ParallelFiles(source=write("a.en", "a\nb\nc"), target=write("a.de", b"a\n\nc\xff"))
    assert faults(source)[1:] == ["a.de:2: the target is empty", "a.de:3: byte 0xff is not utf-8; set `encoding`"]
    assert pairs(rows(source, skip=True)) == [("a", "a")]


def test_all_bad_rows_are_counted_and_a_few_are_listed() -> None:
    source = TextFile(path=write("a.txt", b"ok\n" + b"\xff\n" * 1000), document="line")
    told = faults(source)
    assert told[0].startswith("data.train: 1000 bad rows beside 1 good")
    assert told[1:-1] == [f"a.txt:{i}: byte 0xff is not utf-8; set `encoding`" for i in range(2, 7)]
    assert told[-1] == "... and 995 more"
    assert len(rows(source, skip=True).bad) == 1000
    none = TextFile(path=write("b.txt", b"\xff\n\xff\n"), document="line")
    assert faults(none, skip=True) == [
        "data.train: no rows in b.txt; all 2 are bad, the first: b.txt:1: byte 0xff is not utf-8; set `encoding`"
    ]


def test_a_skipped_line_leaves_the_rest_of_a_document() -> None:
    source = TextFile(path=write("a.txt", b"one\ntw\xffo\nthree\n"))
    assert rows(source, skip=True).columns == {"text": ["one\nthree\n"]}


def test_invented_rows_are_rows() -> None:
    found = rows(SortDigits(count=3))
    assert len(found) == 3
    assert found.origin(2) == "sort (train):3"
    assert faults(SortDigits(count=3, shortest=7, longest=6)) == [
        "data.train.count = 3: must be at most 0, the distinct rows of this kind that are in the train split"
    ]


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
    source = Joined(parts=parts)
    data = Data(train=source, root=str(tmp_path), on_bad_row="skip")
    rows = read(source, data, "train", 0)
    assert rows.columns == {"text": ["one", "two", "three", "four five"]}
    origins = [Path(rows.origin(i)).name for i in range(4)]
    assert origins == ["a.txt:1", "a.txt:3", "b.tsv:2", "c.conll:1"]
    assert [Path(str(bad)).name for bad in rows.bad] == ["b.tsv:3: the text is empty"]
    left = rows.without({1: "is bad"})
    assert [Path(left.origin(i)).name for i in range(3)] == [origins[0], *origins[2:]]


def test_a_part_of_joined_sources_is_told_by_its_number(tmp_path: Path) -> None:
    source = Joined(parts=(TextFile(path="no.txt"),))
    with pytest.raises(ConfigError, match=r"data\.train\.parts\.0\.path"):
        read(source, Data(train=source, root=str(tmp_path)), "train", 0)
    assert [str(fault) for fault in misfits(source, "seq2seq", ("source", "target"))] == [
        "parts.0.kind = 'text': the task seq2seq needs pairs: parallel, table or lines"
    ]
