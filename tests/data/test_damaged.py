"""Files of any content are read in bounded memory, or refused by name."""

import csv
import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from anyformer.config import ConfigError
from anyformer.data.chunks import ChunkedFiles, read_chunks
from anyformer.data.delimited import _csv_reason, read_csv
from anyformer.data.lines import read_lines
from anyformer.data.media_files import BadFile, load_arrays
from anyformer.data.readers import read
from anyformer.data.shard_writer import prepare
from anyformer.recipe import (
    Bytes,
    ClassFolders,
    ConllFile,
    Data,
    MatchedLines,
    ParallelFiles,
    Shards,
    Source,
    TableFile,
    TextFile,
)
from anyformer.training.new_recipe.examine import examine
from tests.calls import CountedCalls

MIB = 2**20


def refusal(source: Source) -> str:
    with pytest.raises(ConfigError) as error:
        read(source, Data(train=source), "train", 0)
    return str(error.value)


def bomb(path: Path, size: int, line: bytes = b"") -> str:
    """A small .gz of `size` bytes: lines, or one letter over and over."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        piece = line * (MIB // len(line)) if line else b"a" * MIB
        for _ in range(size // MIB):
            file.write(piece)
    return str(path)


# -- size -------------------------------------------------------------------------------------------------------------


def test_a_gz_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.data.files.UNPACKED_BYTES", MIB)
    name = bomb(tmp_path / "bomb.txt.gz", 40 * MIB)
    told = refusal(TextFile(path=name))
    assert f"{name} unpacks to more than " in told
    assert "over 100 times its size" in told


def test_a_gz_of_usual_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.data.files.UNPACKED_BYTES", 1)
    text = "\n".join(f"{i} {i * i} {i**3}" for i in range(5000))
    with gzip.open(tmp_path / "text.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    source = TextFile(path=str(tmp_path / "text.gz"))
    assert read(source, Data(train=source), "train", 0).columns["text"] == [text]


@pytest.mark.parametrize("kind", ["texts", "dictionary", "structs"])
def test_a_parquet_that_unpacks_to_too_much_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyformer.data.files.UNPACKED_BYTES", MIB)
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    name, column = str(tmp_path / "bomb.parquet"), "t.u" if kind == "structs" else "t"
    texts: Any = pyarrow.array(["a" * 500] * 10_000)  # one is stored
    if kind == "structs":
        texts = pyarrow.StructArray.from_arrays([texts], ["u"])
    parquet.write_table(pyarrow.table({"t": texts.dictionary_encode() if kind == "dictionary" else texts}), name)
    told = refusal(TableFile(path=name, text=column))
    assert f"{name} unpacks to more than 1 MiB: over 100 times its size" in told
    with pytest.raises(ConfigError, match="unpacks to more than 1 MiB"):
        examine(name, ("text",), table=True)
    streamed = sum(len(chunk.content) for chunk in read_chunks(Path(name), ChunkedFiles(column=column)))
    assert streamed > 4 * MIB  # a part at a time, which needs no limit


def arrays(path: Path, method: int, write: Callable[[IO[bytes]], None]) -> str:
    with zipfile.ZipFile(path, "w", method) as file, file.open("images.npy", "w") as member:
        write(member)
    return str(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_arrays_that_unpack_to_too_much_are_refused(
    method: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyformer.data.files.UNPACKED_BYTES", MIB)
    zeros = np.zeros((4, 1000, 1000), np.uint8)
    name = arrays(tmp_path / "bomb.npz", method, lambda member: np.lib.format.write_array(member, zeros))
    if zeros.nbytes > 1000 * Path(name).stat().st_size:
        with pytest.raises(BadFile, match=r"bomb\.npz unpacks to 4 MiB: over 1,000 times its size"):
            load_arrays(name)
    else:
        assert np.array_equal(load_arrays(name)["images"], zeros)


def test_a_header_that_names_too_many_entries_is_refused(tmp_path: Path) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**45,)}
    name = arrays(tmp_path / "a.npz", 0, lambda member: np.lib.format.write_array_header_1_0(member, header))
    with pytest.raises(BadFile, match=r"a\.npz is no readable array file \(Unable to allocate 32\.0 TiB"):
        load_arrays(name)


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_a_file_beyond_memory_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.data.files.usable_memory", lambda: 8 * MIB)
    path = tmp_path / name
    content = b"to be or not\n" * 300_000
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    told = refusal(TextFile(path=str(path)))
    assert str(path) in told
    assert "this machine's memory allows 2 MiB" in told


def test_rows_of_parquet_beyond_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 10_000] * 2000}), path)  # 20 MB in some kilobytes
    monkeypatch.setattr("anyformer.data.files.usable_memory", lambda: 8 * MIB)
    assert f"{path}:210: the rows have more than 2 MiB of text" in refusal(TableFile(path=str(path), text="text"))


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.data.lines.MAX_LINE", MIB)
    name = bomb(tmp_path / "line.gz", 4 * MIB)
    with pytest.raises(ConfigError, match=r"line\.gz: has a line of more than 1,048,576 characters"):
        list(read_lines([Path(name)], "utf-8", Console(quiet=True)))


def test_a_document_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.data.chunks.MAX_DOCUMENT", MIB)
    name = bomb(tmp_path / "line.jsonl.gz", 4 * MIB)
    with pytest.raises(ConfigError, match=r"line\.jsonl\.gz has a document of more than 1 MiB, from line 1 on"):
        list(read_chunks(Path(name), ChunkedFiles(), size=1000))


@given(content=st.binary(max_size=200) | st.text("a\n\r", max_size=200).map(str.encode), size=st.integers(1, 20))
def test_chunks_are_the_file(content: bytes, size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("chunks") / "text.txt"
    path.write_bytes(content)
    for document in ("line", "blank"):
        found = list(read_chunks(path, ChunkedFiles(document=document), size=size))  # type: ignore[arg-type]
        assert b"".join(chunk.content for chunk in found) == content
        assert [chunk.number for chunk in found[1:]] == [
            1 + b"".join(chunk.content for chunk in found[:i]).count(b"\n") for i in range(1, len(found))
        ]


# -- quotes -----------------------------------------------------------------------------------------------------------


def slow_csv(text: str) -> list[tuple[int, Any]]:
    """The definition: after a bad record the reading begins again at its second line."""
    found: list[tuple[int, Any]] = []
    lines, start = [f"{line}\n" for line in text.split("\n")], 0
    while start < len(lines):
        reader, done = csv.reader(lines[start:], strict=True), 0
        try:
            for cells in reader:
                found += [(start + done + 1, cells)] if cells else []
                done = reader.line_num
        except csv.Error as error:
            found.append((start + done + 1, _csv_reason(str(error))))
            done += 1
        start += done
    return found


@given(text=st.text('a,"\n', max_size=60) | st.text('a,"\n\r', max_size=60))
def test_records_are_those_of_the_definition(text: str) -> None:
    assert read_csv(text) == slow_csv(text)


@pytest.mark.parametrize("line", ['"a\n', 'a,"b\n', '"a" b\n"\n', '"\n"x\n', '""" ,\n'])
def test_unclosed_quotes_take_linear_time(line: str) -> None:
    costs = []
    for lines in (2000, 4000):
        with CountedCalls() as counted:
            assert read_csv(line * lines)
        costs.append(counted.count)
    assert costs[1] < 2.1 * costs[0]


# -- names ------------------------------------------------------------------------------------------------------------

SOURCES: list[tuple[Source, str]] = [
    (TextFile(path="file.txt", encoding="ENC"), "file.txt"),
    (ParallelFiles(source="file.txt", target="file.txt", encoding="ENC"), "file.txt"),
    (TableFile(path="file.tsv", text="a", encoding="ENC"), "file.tsv"),
    (TableFile(path="file.csv", text="a", encoding="ENC"), "file.csv"),
    (TableFile(path="file.jsonl", text="a", encoding="ENC"), "file.jsonl"),
    (MatchedLines(path="file.txt", pattern="(?P<text>.*)", encoding="ENC"), "file.txt"),
    (ConllFile(path="file.conll", encoding="ENC"), "file.conll"),
    (ClassFolders(path="classes", encoding="ENC"), "classes/one/file.txt"),
]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "idna"])
@pytest.mark.parametrize(("source", "name"), SOURCES, ids=lambda x: getattr(x, "kind", x))
def test_a_file_of_another_codec_is_refused_by_name(
    source: Source, name: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\xff\xfe\xfd\xd8\x00 \xed\xa0\x80 odd\n" * 3)
    assert name in refusal(source.model_copy(update={"encoding": encoding}))


@pytest.mark.parametrize(
    "content",
    [b"no archive", gzip.compress(b"text\n" * 100)[:-12], b"", b"\x1f\x8b"],
    ids=["other", "cut", "empty", "two bytes"],  # not by content: gzip stores the time
)
def test_a_damaged_gz_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text.txt.gz"
    path.write_bytes(content)
    assert str(path) in refusal(TextFile(path=str(path)))


@pytest.mark.parametrize(
    "change",
    [
        ("dtype", ">u" + "u" * 20 + "2"),
        ("dtype", "<f8"),
        ("vocabulary", -1),
        ("file", "../tokens-00000.bin"),
        ("file", ".."),
        ("file", "a\0b"),
        ("tokens", 1.5),
    ],
)
def test_a_damaged_index_of_shards_is_refused_by_name(change: tuple[str, Any], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 9, encoding="utf-8")
    prepare([tmp_path / "text.txt"], tmp_path / "shards", Bytes(), ChunkedFiles())
    path, (key, value) = tmp_path / "shards" / "index.json", change
    index = json.loads(path.read_text(encoding="utf-8"))
    (index if key in index else index["shards"][0])[key] = value
    path.write_text(json.dumps(index), encoding="utf-8")
    assert f"{path}: cannot be read: it is damaged" in refusal(Shards(path=str(tmp_path / "shards")))


def test_a_column_of_parquet_whose_name_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"], "column": ["b"]}), path)
    path.write_bytes(path.read_bytes().replace(b"column", b"col\x96mn"))
    assert str(path) in refusal(TableFile(path=str(path), text="text"))
