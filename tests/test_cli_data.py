"""The verbs about shards, and training on what they make."""

import json
import os
import re
from pathlib import Path

import pytest

from anyformer.config import ConfigError, io
from anyformer.data import chunks, shards
from anyformer.data.shards import Corpus, file_digest, open_shards
from anyformer.recipe import Data, Recipe, Shards
from anyformer.training.train import evaluate
from tests.test_cli import done, refused, run
from tests.training.small import TEXT, assert_same_run

RECIPE = """
task = "lm"
tokenizer = "data"
data.train = { kind = "shards", path = "shards", stop = 0.9 }
data.valid = { kind = "shards", path = "shards", start = 0.9 }
batches = { kind = "crops", rows = 4, length = 16 }

[model]
width = 8
target = {}
decoder = { depth = 1, position = "rotary", blocks = { mixer = { heads = 2 }, feedforward = "plain" } }
head = "lm"

[train]
steps = 3
optimizer = { kind = "adamw", lr = 1e-2 }
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ANYFORMER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chunks, "SIZE", 200)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(TEXT.replace(". ", ".\n"), encoding="utf-8")


def prepare(*more: str, tokenizer: str = "bytes") -> str:
    return done("data", "prepare", "*.txt", "--out", "shards", "--tokenizer", tokenizer, "--workers", "1", *more)


def test_prepare_and_show() -> None:
    told = prepare(tokenizer='{kind="bpe", size=280}')
    index = Corpus("shards").index
    assert told.splitlines()[:2] == [
        f"shards: {index.total('tokens'):,} tokens in {len(index.shards)} files",
        "documents  16",
    ]
    assert "280 ids of 2 bytes" in told
    assert done("data", "show", "shards") == told
    assert done("data", "show", "shards", "--check") == told
    assert prepare(tokenizer='{kind="bpe", size=280}') == told  # there already
    done("data", "prepare", "a.txt", "--out", "same", "--tokenizer", "shards", "--workers", "1")
    assert Corpus("same").index.tokenizer == index.tokenizer


def test_wrong_input() -> None:
    def told(*more: str) -> str:
        (line,) = refused("data", "prepare", *more, "--out", "new", "--workers", "1")
        return line

    assert told("c*.txt", "--tokenizer", "bytes") == "c*.txt: no such file"
    assert told(".", "--tokenizer", "bytes") == ".: is not a regular file"
    kinds = "known are chars, bytes, words, bpe, unigram, wordpiece"
    what = 'no such file, and no kind; such as bytes or {kind="bpe", size=32000}'
    assert told("a.txt", "--tokenizer", "bqe") == f"tokenizer = 'bqe': {what}; {kinds}"
    assert told("a.txt", "--tokenizer", "bpe") == "tokenizer.size: is required"
    Path("a.txt").write_bytes(b"one\nt\xffo\n")
    assert told("a.txt", "--tokenizer", "bytes").startswith("a.txt:2: byte 0xff is not utf-8; ")
    skip = ["--on-bad-row", "skip", "--workers", "1"]
    skipped = done("data", "prepare", "a.txt", "--out", "new", "--tokenizer", "bytes", *skip)
    assert "left out   1 bad row: a.txt:2: byte 0xff is not utf-8" in skipped
    (line,) = refused("data", "show", ".")
    assert line == ".: has no index.json: no folder that `anyformer data prepare` made"


def test_train_evaluate_and_go_on() -> None:
    prepare()
    Path("lm.toml").write_text(RECIPE)
    dry = done_quietly("train", "lm.toml", "--dry-run")
    assert "data " in dry
    done_quietly("train", "lm.toml", "--out", "run")
    assert Path("run/tokenizer.json").read_bytes() == Path("shards/tokenizer.json").read_bytes()
    found = json.loads(done("evaluate", "run", "--split", "valid", "--json").splitlines()[-1])
    valid = Corpus("shards", start=0.9)
    assert found["n"] == len(valid) - 1
    metrics = found["metrics"]
    bits = metrics["loss"] * (len(valid) - 1) / 0.6931471805599453 / valid.share("bytes")
    assert metrics["bits_per_byte"] == pytest.approx(bits)


def done_quietly(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_shards_and_text_are_the_same_to_training() -> None:
    done("data", "prepare", "a.txt", "--out", "shards", "--tokenizer", "bytes", "--workers", "1")
    Path("lm.toml").write_text(RECIPE)
    done_quietly("train", "lm.toml", "data.train.stop=1.0", "data.valid.start=0.0", "--out", "one")
    text = '{kind="text", path="a.txt", document="line"}'
    done_quietly("train", "lm.toml", "tokenizer=bytes", f"data.train={text}", f"data.valid={text}", "--out", "other")
    assert_same_run(Path("one"), Path("other"))


MASKED = """
[model]
width = 8
source = {}
encoder = { depth = 1, position = "rotary", blocks = { mixer = { heads = 2 }, feedforward = "plain" } }
head = "masked_lm"
"""


def test_masks_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same however much is read at once."""
    prepare()
    before, _, after = RECIPE.partition("[model]")
    Path("mlm.toml").write_text(before.replace('"lm"', '"mlm"') + MASKED + after[after.index("[train]") :])
    done_quietly("train", "mlm.toml", "--out", "run")
    at_once = evaluate("run", split="valid")
    monkeypatch.setattr("anyformer.tasks.dynamic_examples.MAX_STREAM_ROWS", 2)
    some = evaluate("run", split="valid")
    assert some.count == at_once.count > 0
    assert some.values["loss"] == pytest.approx(at_once.values["loss"])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("tokenizer=chars", "tokenizer = 'chars': shards include their tokenizer: use 'data'"),
        (
            'batches={kind="padded", tokens=64}',
            "batches.kind = 'padded': shards are one long text: use 'crops' or 'ordered'",
        ),
        ("task.framed=true", "task.framed = true: shards hold plain texts, each followed by <eos>; set it to false"),
        (
            'data.train={kind="text", path="a.txt"}',
            "tokenizer = 'data': only shards have one, and data.train is text",
        ),
        ("data.train.start=0.95", "data.train.start = 0.95: must be before stop = 0.9"),
    ],
)
def test_rules(change: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        io.override(io.loads(Recipe, RECIPE), [change])
    assert str(error.value) == expected


def test_another_tokenizer_is_refused() -> None:
    prepare()
    done("data", "prepare", "b.txt", "--out", "chars", "--tokenizer", "chars", "--workers", "1")
    Path("lm.toml").write_text(RECIPE)
    (line,) = refused("train", "lm.toml", "data.valid.path=chars", "--out", "run")
    assert line == "chars: the shards were made with another tokenizer, chars/tokenizer.json"
    (line,) = refused("train", "lm.toml", 'tokenizer={kind="file", path="chars"}', "--out", "run")
    assert line == "shards: the shards were made with another tokenizer, shards/tokenizer.json"
    (line,) = refused("train", "lm.toml", "data.train.path=shrads", "--out", "run")
    assert line.endswith("did you mean 'shards'?")
    assert not Path("run").exists()


def flip(path: Path, start: int, count: int) -> None:
    """Change some bytes of a file, and let its time be another."""
    raw = bytearray(path.read_bytes())
    raw[start : start + count] = bytes(byte ^ 1 for byte in raw[start : start + count])
    path.write_bytes(raw)
    changed = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(changed, changed))


@pytest.mark.parametrize("before", [False, True])
def test_changed_shards_are_not_trained_on(before: bool) -> None:
    """Bytes that were changed are other tokens, and all of them are valid."""
    prepare()
    Path("lm.toml").write_text(RECIPE)
    if before:
        done_quietly("train", "lm.toml", "--out", "run")
    flip(Path("shards/tokens-00001.bin"), 4, 20)
    (line,) = refused("train", "lm.toml", "--out", "new")
    where = "data.train.path: shards/tokens-00001.bin"
    assert line == f"{where}: is not the file that was written: it was changed or swapped"
    assert not Path("new").exists()
    if before:
        assert "tokens-00001.bin: is not the file" in refused("evaluate", "run", "--split", "train")[-1]


def open_all() -> Corpus:
    source = Shards(path="shards")
    return open_shards(source, Data(train=source))


def test_unchanged_shards_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[Path]()

    def count(path: Path) -> str:
        hashed.append(path)
        return file_digest(path)

    monkeypatch.setattr(shards, "file_digest", count)
    prepare()
    open_all()
    assert len(hashed) == len(set(hashed)) == len(Corpus("shards").index.shards)
    hashed.clear()
    for _ in range(2):
        open_all()
    assert not hashed
    shard = Path("shards/tokens-00002.bin")
    os.utime(shard, ns=(10**18, 10**18))
    open_all()
    assert hashed == [shard]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"tokens-00001.bin": 3}'])
def test_a_cache_of_verified_shards_that_cannot_be_used(content: str | None) -> None:
    prepare()
    open_all()
    (cached,) = Path("cache/anyformer/shards").glob("*.json")
    if content is None:
        cached.unlink()
        Path("cache/anyformer/shards").rmdir()
        Path("cache/anyformer/shards").write_text("no folder")
    else:
        cached.write_text(content)
    open_all()
    flip(Path("shards/tokens-00001.bin"), 4, 20)
    with pytest.raises(ConfigError, match=r"path: shards/tokens-00001\.bin: is not the file that was written"):
        open_all()


def test_ids_outside_the_vocabulary_name_the_file() -> None:
    """The checksum of such a file may be right: it is that of ids which no tokenizer has made."""
    prepare()
    Path("lm.toml").write_text(RECIPE)
    for shard in (index := json.loads(Path("shards/index.json").read_text()))["shards"]:
        path = Path("shards", shard["file"])
        path.write_bytes(b"\xff" * path.stat().st_size)
        shard["sha256"] = file_digest(path)
    Path("shards/index.json").write_text(json.dumps(index))
    (line,) = refused("train", "lm.toml", "--out", "run")
    assert re.fullmatch(r"shards/tokens-\d+\.bin: holds the id 65535, and its tokenizer has 262 ids", line), line
