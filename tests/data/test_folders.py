"""A folder for each class, a file for each text: what is read, in which order, and what is told of the rest."""

import gzip
from pathlib import Path

import pytest

from anyformer.config import ConfigError
from anyformer.data.readers import Rows, read
from anyformer.recipe import ClassFolders, Data, TextFile

FILES = {
    "pos/10.txt": "very good",
    "pos/2.txt": "good\r\nindeed\r\n",
    "neg/1.txt": "  bad\n",
    "neg/sub.gz": "packed",
    "very neg/a": "\ufeffworse\n\nand worse",
    "pos/.DS_Store": "\0",
    ".cache/x": "\0",
    "README.txt": "about it",
}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("ANYFORMER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        path = tmp_path / "films" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = text.encode()
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return tmp_path / "films"


def rows(skip: bool = False, **more: object) -> Rows:
    source = ClassFolders(**{"path": "films", **more})
    return read(source, Data(train=source, on_bad_row="skip" if skip else "error"), "train", 0)


def told(**more: object) -> list[str]:
    with pytest.raises(ConfigError) as error:
        rows(**more)
    return str(error.value).splitlines()


def test_every_file_is_a_text_of_its_folder() -> None:
    found = rows()
    assert list(zip(found.columns["label"], found.columns["text"], strict=True)) == [
        ("neg", "bad"),
        ("neg", "packed"),
        ("pos", "very good"),
        ("pos", "good\nindeed"),
        ("very neg", "worse\n\nand worse"),
    ]
    assert [found.origin(i) for i in range(len(found))] == [
        f"films/{name}:1" for name in ("neg/1.txt", "neg/sub.gz", "pos/10.txt", "pos/2.txt", "very neg/a")
    ]


def test_parts_cover_all_and_do_not_overlap(folder: Path) -> None:
    for i in range(100):
        (folder / "pos" / f"more-{i:03}").write_text(f"text {i}")
    whole, parts = rows(), [rows(start=start, stop=stop) for start, stop in ((0.0, 0.4), (0.4, 0.9), (0.9, 1.0))]
    origins = sorted(part.origin(i) for part in parts for i in range(len(part)))
    assert origins == sorted(whole.origin(i) for i in range(len(whole)))
    assert [len(part) for part in parts] == pytest.approx([42, 52.5, 10.5], abs=3)


def test_bad_files_are_told_by_name_and_line(folder: Path) -> None:
    (folder / "neg" / "2.txt").write_bytes(b"one\ntw\xffo")
    (folder / "neg" / "3.txt").write_bytes(b" \n")
    (folder / "pos" / "4.txt").write_bytes(b"n\0l")
    found = told()
    assert found[0].startswith("data.train: 3 bad rows and 5 good: ")
    assert found[1:] == [
        "films/neg/2.txt:2: byte 0xff is not utf-8; set `encoding`",
        "films/neg/3.txt:1: the text is empty",
        "films/pos/4.txt:1: holds a NUL character",
    ]
    left = rows(skip=True)
    assert len(left) == 5
    assert [str(bad) for bad in left.without({1: "is long"}).bad][-1] == "films/neg/sub.gz:1: is long"
    assert [left.without({1: "is long"}).origin(i) for i in (0, 1)] == ["films/neg/1.txt:1", "films/pos/10.txt:1"]
    (folder / "neg" / "2.txt").write_text("Grüße", encoding="latin-1")
    assert "films/neg/2.txt:1: byte 0xfc is not utf-8; set `encoding`" in told()
    assert "Grüße" in rows(encoding="latin-1", skip=True).columns["text"]


def test_wrong_folders(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "a.txt").write_text("a")
    at = "data.train.path = "
    what = "no folder in flat: each class is a folder, and each file in it a text"
    assert told(path="flat") == [f"{at}'flat': {what}"]
    assert told(path="flat/a.txt") == [f"{at}'flat/a.txt': flat/a.txt is not a folder"]
    assert told(path="flims")[0].endswith("; did you mean 'films'?")
    assert told(encoding="utf-9") == ["data.train.encoding = 'utf-9': unknown; did you mean 'utf-8'?"]
    (folder / "neg" / "deeper").mkdir()
    what = "films/neg/deeper is a folder inside a class folder, which may hold files only"
    assert told() == [f"{at}'films': {what}"]
    (folder / "neg" / "deeper").rmdir()
    (folder / "empty").mkdir()
    assert told() == [f"{at}'films': no file in films/empty: each file in a class folder is a text"]
    (folder / "empty").rmdir()
    (folder / "neg" / "sub.gz").write_bytes(b"no archive")
    assert told()[0].startswith(f"{at}'films': films/neg/sub.gz is not a whole gzip file (")


def test_rows_of_one_file_name_it_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\nb")
    source = TextFile(path="a.txt", document="line")
    assert read(source, Data(train=source), "train", 0).files is None
