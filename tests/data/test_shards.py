"""Shards hold every document once and in order; pieces are read across files; a kill changes nothing."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anyformer.config import ConfigError
from anyformer.data import chunks, shard_writer
from anyformer.data.chunks import Bad, Chunk, ChunkedFiles, documents, read_chunks
from anyformer.data.shard_writer import prepare
from anyformer.data.shards import Corpus, Index, InMemory
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import BPE, Bytes, Characters
from tests.forking import forking

LINES = [f"line {i} says {'really ' * (i % 7)}{i * i}" for i in range(200)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chunks, "SIZE", 300)
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    Path(name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return Path(name)


def made(*paths: Path, out: str = "out", how: ChunkedFiles | None = None, **options: object) -> Corpus:
    how = how or ChunkedFiles()
    prepare(paths, Path(out), Bytes(), how, **options)  # type: ignore[arg-type]
    return Corpus(out)


def texts(corpus: Corpus) -> list[str]:
    """What the documents say."""
    tokenizer = corpus.tokenizer()
    (ids,) = corpus.cut(np.array([0]), len(corpus))
    assert ids[-1] == tokenizer.eos
    ends = np.flatnonzero(ids == tokenizer.eos)
    return [tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1]]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    (line,) = str(error.value).splitlines()
    return line


# -- chunks -----------------------------------------------------------------------------------------------------------

PARTS = st.lists(st.text("ab \r\n가\u2028", max_size=8), max_size=30)


@pytest.mark.parametrize("gz", ["", ".gz"])
@given(PARTS, st.integers(1, 40))
@settings(max_examples=40)
def test_chunks_are_the_file_and_are_cut_between_documents(gz: str, parts: list[str], size: int) -> None:
    text = "\n".join(parts)
    path = write(f"a.txt{gz}", text)
    for document in ("line", "blank", "file"):
        how = ChunkedFiles(document)
        cut = list(read_chunks(path, how, size))
        assert b"".join(chunk.content for chunk in cut) == text.encode()
        assert [chunk.last for chunk in cut] == [False] * (len(cut) - 1) + [True]
        before = 1
        for chunk in cut:
            assert chunk.number == before
            before += chunk.content.count(b"\n")
            assert chunk.last or len(chunk.content) >= size - 3
        together = [found for chunk in cut for found in documents(chunk, how)]
        at_once = list(documents(Chunk(path, 1, text.encode(), True, 0), how))
        assert not any(isinstance(found, Bad) for found in together)
        if document == "file":
            if not text.strip():
                continue  # only a chunk that is the whole file can tell that there is nothing but white space
            assert "".join(found.text for found in together) == "".join(found.text for found in at_once)
            assert sum(found.ends for found in together) == sum(found.ends for found in at_once)
        else:
            assert together == at_once


def test_a_long_document_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE", 50)
    monkeypatch.setattr(shard_writer, "TOGETHER", 80)
    text = "\n".join(LINES)
    for ending in ("", "\n", "\n\n"):
        found = made(
            write("a.txt", text + ending), write("b.txt", "short"), out=f"out{len(ending)}", how=ChunkedFiles("file")
        )
        assert texts(found) == [text + ending, "short"]


# -- the same text, however it is written -----------------------------------------------------------------------------


def test_every_kind_of_file_gives_its_documents() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    half = len(LINES) // 2
    as_json = "\n".join(json.dumps({"meta": {"text": line}}) for line in LINES)
    parquet.write_table(pyarrow.table({"meta": [{"text": line} for line in LINES], "x": LINES}), "a.parquet")
    nested = ChunkedFiles(column="meta.text")
    for paths, how in (
        ([write("a.txt", "\n".join(LINES))], ChunkedFiles()),
        ([write("a.txt.gz", "\r\n".join(LINES[:half])), write("b.txt", "\n".join(LINES[half:]))], ChunkedFiles()),
        ([write("p.txt", "\n\n".join(LINES))], ChunkedFiles("blank")),
        ([write("a.jsonl", as_json)], nested),
        ([write("a.jsonl.gz", as_json)], nested),
        ([Path("a.parquet")], nested),
    ):
        corpus = made(*paths, out=f"of-{paths[0].name}", how=how)
        assert texts(corpus) == LINES
        assert len(corpus.index.shards) > 5
        assert corpus.index.total("documents") == len(LINES)
        assert corpus.index.total("bytes") == sum(map(len, LINES))
        corpus.verify()


def tree(folder: str | Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_tokenizer_is_trained_on_all_parts() -> None:
    lines = [chr(ord("a") + i * 26 // 400) * 3 for i in range(400)]
    path = write("a.txt", "\n".join(lines))
    found = "".join(shard_writer._sample([path], ChunkedFiles(), 400))
    assert all(chunk.content[:1].decode() in found for chunk in read_chunks(path, ChunkedFiles(), 300))
    assert 200 < len(found) < 600
    prepare([path], Path("out"), Characters(), ChunkedFiles(), sample=400)
    tokenizer = Corpus("out").tokenizer()
    assert {c for c in "".join(lines) if tokenizer.encode(c) != [tokenizer.unk]} == set(found)


def test_ids_are_as_wide_as_they_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.txt", "\n".join(LINES))
    narrow = made(path)
    monkeypatch.setattr(TextTokenizer, "__init__", wide(TextTokenizer.__init__))
    broad = made(path, out="wide")
    assert (narrow.index.dtype, broad.index.dtype) == ("<u2", "<u4")
    at = np.arange(0, len(narrow) - 10, 7)
    assert np.array_equal(narrow.cut(at, 10), broad.cut(at, 10))


def wide(real: Callable[..., None]) -> Callable[..., None]:
    def init(self: TextTokenizer, *arguments: object) -> None:
        real(self, *arguments)
        self.size = 70_000

    return init


# -- pieces -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("\n".join(LINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "SIZE", 300)
        prepare([folder / "a.txt"], folder / "out", Bytes(), ChunkedFiles())
    return folder / "out"


@given(st.data())
def test_pieces_are_those_of_the_whole(corpus: Path, data: st.DataObject) -> None:
    start = data.draw(st.floats(0, 0.9))
    stop = data.draw(st.floats(min(1.0, start + 0.05), 1))
    part, whole = Corpus(corpus, start, stop), Corpus(corpus)
    (ids,) = whole.cut(np.array([0]), len(whole))
    held = InMemory(ids[int(len(ids) * start) : int(len(ids) * stop)])
    assert len(part) == len(held)
    length = data.draw(st.integers(0, len(part)))
    starts = np.array(data.draw(st.lists(st.integers(0, len(part) - length), min_size=1, max_size=5)))
    found = part.cut(starts, length)
    assert found.dtype == np.int64
    assert np.array_equal(found, held.cut(starts, length))
    with pytest.raises(IndexError):
        part.cut(np.array([len(part) - length + 1]), length)


def test_parts_share_the_whole_out(corpus: Path) -> None:
    parts = [Corpus(corpus, start, stop) for start, stop in ((0, 0.3), (0.3, 0.31), (0.31, 1))]
    index = parts[0].index
    assert sum(map(len, parts)) == index.total("tokens")
    for what in ("bytes", "documents"):
        assert abs(sum(part.share(what) for part in parts) - index.total(what)) <= 2
    assert parts[0].share("bytes") == pytest.approx(0.3 * index.total("bytes"), rel=0.02)


def test_damage_is_named(corpus: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(corpus, tmp_path / "copy"))
    shard = copy / "tokens-00003.bin"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-2] + b"xy")
    opened = Corpus(copy)
    assert refused(opened.verify) == f"{shard}: is not the file that was written: it was changed or swapped"
    shard.write_bytes(raw[:-2])
    assert refused(lambda: opened.cut(np.array([0]), len(opened))) == f"{shard}: was cut short"
    what = f"{shard}: is not the file that was written: it has {len(raw) - 2:,} bytes, and had {len(raw):,}"
    assert refused(lambda: Corpus(copy)) == what
    shard.unlink()
    assert refused(lambda: Corpus(copy)) == f"{shard}: cannot be read: No such file or directory"
    (copy / "index.json").write_text("{")
    assert refused(lambda: Corpus(copy)) == f"{copy / 'index.json'}: cannot be read: it is damaged"
    (copy / "index.json").unlink()
    assert "are not finished: run `anyformer data prepare` again" in refused(lambda: Corpus(copy))
    (copy / "plan.json").unlink()
    assert "no folder that `anyformer data prepare` made" in refused(lambda: Corpus(copy))
    (corpus_copy := Path(shutil.copytree(corpus, tmp_path / "other")) / "tokenizer.json").write_text(
        (corpus / "tokenizer.json").read_text().replace('"a":', '"\\u00ff\\u00ff":')
    )
    assert refused(Corpus(tmp_path / "other").tokenizer).startswith(f"{corpus_copy}: is not the tokenizer")


# -- bad rows ---------------------------------------------------------------------------------------------------------


def test_bad_rows_are_told_by_line_or_left_out() -> None:
    """By workers in processes of their own, too; and what they write is the same."""
    lines = [line.encode() for line in LINES]
    lines[77], lines[150] = b"b\xffd", b"n\0l"
    path = write("a.txt", b"\n".join(lines))
    mend = "mend it, or leave such rows out by --on-bad-row skip"
    assert refused(lambda: made(path)) == f"a.txt:78: byte 0xff is not utf-8; set `encoding`; {mend}"
    corpus = made(path, skip_bad=True)  # which goes on
    assert texts(corpus) == [line for i, line in enumerate(LINES) if i not in (77, 150)]
    assert corpus.index.total("bad") == 2
    assert corpus.index.first_bad == (
        "a.txt:78: byte 0xff is not utf-8; set `encoding`",
        "a.txt:151: holds a NUL character",
    )
    assert refused(lambda: made(path, out="two", workers=2)).endswith(mend)
    made(path, out="two", workers=2, skip_bad=True)
    assert tree("two") == tree("out")


def test_bad_records() -> None:
    lines = ['{"a": {"b": "ok"}}', '{"a": {"c": 1}}', "[1]", '{"a": {"b": " "}}', '{"a": {"b": null}}', "{"]
    corpus = made(write("a.jsonl", "\n".join(lines)), how=ChunkedFiles(column="a.b"), skip_bad=True)
    assert texts(corpus) == ["ok"]
    assert corpus.index.first_bad == (
        "a.jsonl:2: has no field 'a.b': 'a' has no 'b'",
        "a.jsonl:3: not a JSON object",
        "a.jsonl:4: the text is empty",
        "a.jsonl:5: the field 'a.b' is null: must be a string or a number",
        "a.jsonl:6: not valid JSON: Expecting property name enclosed in double quotes at column 2",
    )


def test_whole_files() -> None:
    how = ChunkedFiles(encoding="utf-16")
    what = "encoding = 'utf-16': the end of a line is not one byte in it; write utf-8"
    assert refused(lambda: made(write("a.txt", "a"), how=how)) == what
    assert not Path("out").exists()
    assert refused(lambda: made(write("b.txt", "\n \n"))) == "out: there is no text in these files"
    whole = gzip.compress(b"one\n" * 500)
    Path("c.txt.gz").write_bytes(whole[:-9])
    assert "c.txt.gz is not a whole gzip file (" in refused(lambda: made(Path("c.txt.gz"), out="c"))
    assert refused(lambda: made(Path("gone.txt"), out="d")) == "gone.txt: cannot be read (No such file or directory)"


# -- going on ---------------------------------------------------------------------------------------------------------


def test_other_inputs_are_refused() -> None:
    path = write("a.txt", "\n".join(LINES))
    made(path)
    before = tree("out")
    index = Index.load(Path("out"))
    assert prepare([path], Path("out"), Bytes(), ChunkedFiles()) == index  # there already
    other = write("b.txt", "other")
    refusal = "out: holds shards of something else: {}; choose another --out"
    assert refused(lambda: made(other)) == refusal.format("of the files a.txt")
    assert refused(lambda: made(path, how=ChunkedFiles("blank"))).startswith(
        "out: holds shards of something else: input was "
    )
    found = refused(lambda: prepare([path], Path("out"), BPE(size=300), ChunkedFiles()))
    assert found == refusal.format("tokenizer was bytes, and is bpe(size=300) now")
    write("a.txt", "\n".join(LINES[::-1]))
    size = path.stat().st_size
    changed = f"the file a.txt has changed since ({size:,} bytes, now {size:,})"
    assert refused(lambda: made(path)) == refusal.format(changed)
    assert tree("out") == before
    Path("thesis").mkdir()
    (Path("thesis") / "thesis.tex").touch()
    assert refused(lambda: made(path, out="thesis")) == "thesis: is not empty and holds no shards: choose another --out"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(out: Path, writes: int | None, seconds: float | None) -> None:
    """Prepares in a process of its own, which dies at the n-th write, or by the clock."""
    import threading

    chunks.SIZE = 300
    real, count = shard_writer.write_file, 0

    def dying(path: Path, content: bytes) -> None:
        nonlocal count
        count += 1
        if count == writes:
            path.with_name(".anyformer-0123.tmp").write_bytes(content[: len(content) // 2])
            die()
        real(path, content)

    shard_writer.write_file = dying
    if seconds is not None:
        threading.Timer(seconds, die).start()
    prepare([out.parent / "a.txt"], out, BPE(size=280), ChunkedFiles())


def orphaned(out: Path) -> None:
    """Prepares by two workers, and dies while they work."""
    chunks.SIZE = 300
    told = 0

    def progress(done: int, left: int) -> None:
        nonlocal told
        told += 1
        if told == 4:
            pids = [str(process.pid) for process in multiprocessing.active_children()]
            (out.parent / "workers").write_text(" ".join(pids))
            die()

    prepare([out.parent / "a.txt"], out, BPE(size=280), ChunkedFiles(), workers=2, progress=progress)


def test_kills_change_nothing(tmp_path: Path) -> None:
    """SIGKILL within a write, or at any moment; and a log that was cut short."""
    write("a.txt", "\n".join(LINES))
    prepare([tmp_path / "a.txt"], tmp_path / "straight", BPE(size=280), ChunkedFiles())
    context, chance = forking(), random.Random(0)
    out = tmp_path / "out"
    for number, moment in enumerate([1, 2, chance.randint(3, 9), None, chance.randint(5, 12), chance.randint(5, 12)]):
        clock = None if moment is not None else chance.uniform(0.0, 0.05)
        process = context.Process(target=killed, args=(out, moment, clock))
        process.start()
        process.join()
        assert process.exitcode == -9
        assert not (out / "index.json").exists()
        if number == 4:
            log = out / "done.jsonl"
            log.write_text(log.read_text()[:-20])
    again: list[int] = []
    prepare(
        [tmp_path / "a.txt"],
        out,
        BPE(size=280),
        ChunkedFiles(),
        progress=lambda done, left: again.append(left),
    )
    assert 0 < again[0] < (tmp_path / "a.txt").stat().st_size, "what was done is not done again"
    assert tree(out) == tree(tmp_path / "straight")


def test_workers_end_with_the_first_process(tmp_path: Path) -> None:
    write("a.txt", "\n".join(LINES))
    process = forking().Process(target=orphaned, args=(tmp_path / "out",))
    process.start()
    process.join()
    assert process.exitcode == -9
    pids = (tmp_path / "workers").read_text().split()
    assert len(pids) == 2
    until = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < until
        time.sleep(0.02)
    prepare([tmp_path / "a.txt"], tmp_path / "out", BPE(size=280), ChunkedFiles())
    prepare([tmp_path / "a.txt"], tmp_path / "straight", BPE(size=280), ChunkedFiles())
    assert tree(tmp_path / "out") == tree(tmp_path / "straight")


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
