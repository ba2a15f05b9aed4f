"""Files and rows that cannot be read are told by file and line, all of them at once."""

import gzip
from pathlib import Path

import pytest

from anyformer.recipe import MatchedLines, ParallelFiles, SortDigits, Source, TableFile, TextFile
from tests.data.source_files import QA, faults, pairs, rows, write

pytestmark = pytest.mark.usefixtures("empty_folder")


# -- what is wrong with a whole file ----------------------------------------------------------------------------------


def test_whole_files(tmp_path: Path) -> None:
    table = write("t.csv", "question,answer,answer\n1,2,3\n")
    (tmp_path / "without").mkdir()
    for source, expected in (
        (TableFile(path=".", format="csv", text="a"), "data.train.path = '.': . is not a regular file"),
        (
            TextFile(path=str(tmp_path / "without")),
            f"data.train.path = '{tmp_path}/without': {tmp_path}/without has no text files "
            "(.txt, .text, .md, .markdown, .rst)",
        ),
        (TextFile(path="/dev/null"), "data.train.path = '/dev/null': /dev/null is not a regular file"),
        (TextFile(path="a\0b"), "data.train.path = 'a\\x00b': cannot be the name of a file (embedded null byte)"),
        (TextFile(path="x" * 300), f"data.train.path = '{'x' * 300}': {'x' * 300} cannot be read (File name too long)"),
        (TextFile(path=write("empty.txt", "")), "data.train: no rows in empty.txt"),
        (TextFile(path=write("blank.txt", " \n\n")), "data.train: no rows in blank.txt"),
        (TableFile(path=write("header.csv", "a,b\n"), text="a"), "data.train: no rows in header.csv"),
        (
            ParallelFiles(source=write("3.en", "a\nb\nc\n"), target=write("2.de", "a\n\n")),
            "data.train: 3.en has 3 lines, 2.de has 2: parallel files must have the same number of lines",
        ),
        (
            TableFile(path=table, source="qestion", target="answer"),
            "data.train.source = 'qestion': no such column in t.csv, separated by commas; did you mean 'question'?\n"
            "data.train.target = 'answer': 2 columns of t.csv have this name",
        ),
        (
            TableFile(path=table, text="3", header=False),
            "data.train.text = '3': no such column in t.csv, separated by commas; known here: 0, 1, 2",
        ),
        (
            TableFile(path=write("t.jsonl", '{"question": 1}\n{"answer": 2}'), text="anser"),
            "data.train.text = 'anser': no such column in t.jsonl; did you mean 'answer'?",
        ),
        (TableFile(path=table), "data.train: names no column: set `source` and `target`, or `text`"),
        (
            TableFile(path="t.txt", text="a"),
            "data.train.format: is not clear from the name 't.txt': set it to 'tsv', 'csv', 'jsonl' or 'parquet'",
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
            "3: has 1 columns, the first row has 2, separated by tabs",
            "4: has 3 columns, the first row has 2, separated by tabs",
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
            "5: a carriage return is outside of quotes",
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
        f'data.train: {len(expected)} bad {noun} and {len(found)} good: fix them, or set data.on_bad_row = "skip"'
    )


def test_the_target_is_bad_in_its_own_file() -> None:
    source = ParallelFiles(source=write("a.en", "a\nb\nc"), target=write("a.de", b"a\n\nc\xff"))
    assert faults(source)[1:] == ["a.de:2: the target is empty", "a.de:3: byte 0xff is not utf-8; set `encoding`"]
    assert pairs(rows(source, skip=True)) == [("a", "a")]


def test_all_bad_rows_are_counted_and_a_few_are_listed() -> None:
    source = TextFile(path=write("a.txt", b"ok\n" + b"\xff\n" * 1000), document="line")
    told = faults(source)
    assert told[0].startswith("data.train: 1000 bad rows and 1 good")
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
