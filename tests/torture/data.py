"""Damage data files of every format: each is read, or refused by a `ConfigError` that names the file.

Bytes are flipped, cut, inserted, repeated or zeroed; archives are damaged inside and outside; files are read by a codec
or as a format that they do not have.
"""

import argparse
import gzip
import json
import random
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anyformer.config import ConfigError
from anyformer.data.chunks import ChunkedFiles
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
from tests.torture.limited import Broken, run_cases

SECONDS = 10.0  # of a case
LONGEST = 5000  # characters of an error
CODECS = (
    *("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7", "latin-1", "ascii", "cp949", "euc-kr", "shift_jis"),
    *("gb18030", "big5", "iso2022_jp", "hz", "cp037", "idna", "unicode_escape", "raw_unicode_escape", "johab"),
)
ODD_BYTES = (
    *(
        b"\0",
        b"\r",
        b"\n",
        b"\t",
        b'"',
        b'"' * 99,
        b",",
        b"\\",
        b"\xff",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\x1f\x8b\x08",
    ),
    *(b'{"text": "\\ud800"}\n', b'{"text": NaN, "label": 1e400}\n', b"[" * 9999, b'{"text": ' * 9999, b"9" * 9999),
    *(b"\x1f\x8b\x08", b"\xe2\x80\xa8", b"\x85", b"PAR1", b"a" * 300_000, b"\n" * 50_000, b'"\n' * 20_000),
)
LINES = ["안녕하세요, 세계", "the quick brown fox", 'says "yes", twice', "你好，世界", "naïve café", "1 2 3", "last"]


class Format(NamedTuple):
    """A source, and the files that it reads, of which any may be damaged."""

    source: Source
    files: tuple[str, ...]


def formats(folder: Path) -> list[Format]:
    """Good files of every format in a folder, packed and not."""
    numbered = list(enumerate(LINES * 9))
    rows = [{"text": line, "label": str(i % 3), "meta": {"n": i, "tags": ["x", line]}} for i, line in numbered]
    quoted = [line.replace('"', '""') for line in LINES * 9]
    words = [list(enumerate(line.split())) for line in LINES * 5]
    tagged = ("\n".join(f"{word}\tB-{i % 3}" for i, word in sentence) for sentence in words)
    treebank = ("\n".join(f"{i + 1}\t{word}\t_\tNOUN" for i, word in sentence) for sentence in words)
    tables = {
        "table.tsv": "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows),
        "table.csv": "text,label\n" + "".join(f'"{text}",{i % 3}\n' for i, text in enumerate(quoted)),
        "table.jsonl": "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)),
    }
    texts = {
        **tables,
        "text.txt": "\n".join(LINES * 9),
        "lines.txt": "".join(f"{row['label']} :: {row['text']}\n" for row in rows),
        "source.txt": "".join(f"{row['text']}\n" for row in rows),
        "target.txt": "".join(f"{row['label']} {row['text']}\n" for row in rows),
        "tags.conll": "\n\n".join(tagged) + "\n",
        "tags.conllu": "".join(f"# a sentence\n{sentence}\n\n" for sentence in treebank),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
        (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    for i, line in enumerate(LINES):
        (folder / "classes" / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
        (folder / "classes" / f"c{i % 2}" / f"{i}.txt").write_text(line, encoding="utf-8")
    found = []
    for gz in ("", ".gz"):
        found += [Format(TableFile(path=name + gz, text="text", label="label"), (name + gz,)) for name in tables]
        found += [
            Format(TableFile(path=f"table.jsonl{gz}", text="meta.tags.1", label="meta.n"), (f"table.jsonl{gz}",)),
            Format(TextFile(path=f"text.txt{gz}"), (f"text.txt{gz}",)),
            Format(TextFile(path=f"text.txt{gz}", document="line", start=0.2, stop=0.9), (f"text.txt{gz}",)),
            Format(MatchedLines(path=f"lines.txt{gz}", pattern="(?P<label>.) :: (?P<text>.*)"), (f"lines.txt{gz}",)),
            Format(ParallelFiles(source=f"source.txt{gz}", target="target.txt"), (f"source.txt{gz}", "target.txt")),
            Format(ConllFile(path=f"tags.conll{gz}"), (f"tags.conll{gz}",)),
            Format(ConllFile(path=f"tags.conllu{gz}"), (f"tags.conllu{gz}",)),
        ]
    classes = tuple(sorted(str(path.relative_to(folder)) for path in (folder / "classes").glob("*/*")))
    found.append(Format(ClassFolders(path="classes"), classes))
    prepare([folder / "text.txt"], folder / "shards", Bytes(), ChunkedFiles())
    shards = tuple(sorted(str(path.relative_to(folder)) for path in (folder / "shards").iterdir() if path.is_file()))
    found += [Format(Shards(path="shards"), shards)] * 2
    return found + _parquet(folder, rows)


def _parquet(folder: Path, rows: list[dict[str, Any]]) -> list[Format]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        print("without pyarrow: no Parquet files")
        return []
    found = []
    written: dict[str, dict[str, Any]] = {
        "plain": {"compression": "none"},
        "snappy": {},
        "gzip": {"compression": "gzip", "row_group_size": 9},
    }
    for name, options in written.items():
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet", **options)
        found.append(Format(TableFile(path=f"{name}.parquet", text="text", label="meta.n"), (f"{name}.parquet",)))
    return found * 2


# -- damage -----------------------------------------------------------------------------------------------------------


def damaged(content: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(content) + 1), rng.choice((1, 1, 2, 8, 64, 1000))
    match rng.randrange(8):
        case 0 | 1:
            flipped = bytearray(content)
            for _ in range(min(size, len(content))):
                flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 2:
            return content[:at]
        case 3:
            return content[:at] + content[at + size :]
        case 4:
            return content[:at] + rng.choice(ODD_BYTES) + content[at:]
        case 5:
            return content[:at] + rng.randbytes(size) + content[at + size * rng.randrange(2) :]
        case 6:
            return content[:at] + content[at : at + size] * rng.choice((2, 20)) + content[at + size :]
        case _:
            return content[:at] + bytes(size) + content[at + size :]


def damage(content: bytes, packed: bool, rng: random.Random) -> bytes:
    if packed and rng.random() < 0.5:  # inside a good archive
        return gzip.compress(damage(gzip.decompress(content), False, rng))
    if rng.random() < 0.1:
        return rng.choice(
            (b"", gzip.compress(content), content.decode("utf-8", "replace").encode("utf-16"), b"\0" * 500)
        )
    for _ in range(rng.choice((1, 1, 3))):
        content = damaged(content, rng)
    return content


# -- laws -------------------------------------------------------------------------------------------------------------


def case(folder: Path, known: list[Format], seed: int, number: int) -> str:
    rng = random.Random(f"{seed} {number}")
    source, files = rng.choice(known)
    if not isinstance(source, Shards) and rng.random() < 0.25:
        source = source.model_copy(update={"encoding": rng.choice(CODECS)})
    with tempfile.TemporaryDirectory() as at:
        here, name = Path(at), rng.choice(files)
        for file in files:
            (here / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, here / file)
        content = (here / name).read_bytes()
        (here / name).write_bytes(damage(content, name.endswith(".gz"), rng))
        data = Data(train=source, root=str(here), on_bad_row=rng.choice(("error", "skip")))
        try:
            rows = read(source, data, "train", 0)
            if rows.stream is not None:
                rows.stream.tokenizer()
                rows.stream.cut([0, len(rows.stream) - 1], 1)
        except ConfigError as error:
            return told(error, source, files)
    return "read" if not rows.bad else "read in part"


def told(error: ConfigError, source: Source, files: tuple[str, ...]) -> str:
    text = str(error)
    if len(text) > LONGEST:
        raise Broken(f"is refused in {len(text)} characters")
    text.encode()  # a terminal prints it
    about_codec = text.startswith("data.train.encoding")  # a setting, and no file, is wrong
    if not about_codec and not any(Path(name).name in text for name in (*files, "shards")):
        raise Broken(f"{source.kind} is refused without its name: {text[:200]}")
    return "refused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        known = formats(Path(folder))
        numbers = range(given.first, given.first + given.cases)
        fine = run_cases(partial(case, Path(folder), known, given.seed), numbers, SECONDS, "data")
    if not fine:
        sys.exit(1)
