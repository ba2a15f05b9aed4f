"""One long text as token ids: in memory, or in files of any length. Imports no torch.

A folder that `anyformer data prepare` made:

    tokens-00000.bin, ...    ids of two bytes each (four, if there are more than 65,536), <eos> after each document
    tokenizer.json           by which they are read
    index.json               the contents of each file, written last
    plan.json                of what and how they were made
"""

import hashlib
import itertools
import json
import os
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from anyformer.config.io import write_file
from anyformer.config.spec import ConfigError, Fault, faults_under, is_file_name, visible
from anyformer.data.files import locate
from anyformer.data.tokenizer import FILE, TextTokenizer
from anyformer.kernels.conventions import user_cache
from anyformer.kernels.hardware import usable_cores
from anyformer.recipe import Root, Shards

INDEX = "index.json"
DTYPES = ("<u2", "<u4")  # of the ids in the files


class Stream(Protocol):
    """A text as ids, of which pieces can be read."""

    def __len__(self) -> int: ...

    def cut(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The pieces of `length` ids from each of some places on, [n, length] of int64."""


class InMemory:
    """A stream that is there as a whole."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]]) -> "InMemory":
        return cls(np.concatenate([np.asarray(ids, dtype=np.int32) for ids in documents]))

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, starts: np.ndarray, length: int) -> np.ndarray:
        return self.ids[np.asarray(starts)[:, None] + np.arange(length)].astype(np.int64)


@dataclass(frozen=True)
class ShardContents:
    """Contents of one file."""

    file: str
    tokens: int
    documents: int
    bytes: int  # of text
    bad: int  # rows that were left out
    sha256: str


@dataclass(frozen=True)
class Index:
    """Contents of a folder."""

    tokenizer: str  # digest
    vocabulary: int
    dtype: str
    first_bad: tuple[str, ...]  # rows that were left out, some of them
    shards: tuple[ShardContents, ...]

    def total(self, what: str) -> int:
        return sum(getattr(shard, what) for shard in self.shards)

    def check(self) -> None:
        """Raise a `ValueError` for values that `anyformer data prepare` never writes."""
        counts = [n for shard in self.shards for n in (shard.tokens, shard.documents, shard.bytes, shard.bad)]
        names = [shard.file for shard in self.shards]
        if any(type(n) is not int or n < 0 for n in (self.vocabulary, *counts)) or self.dtype not in DTYPES:
            raise ValueError
        if not all(map(is_file_name, names)):
            raise ValueError

    def dumps(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def load(cls, folder: Path) -> "Index":
        path = folder / INDEX
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            shards = tuple(ShardContents(**shard) for shard in found.pop("shards"))
            index = cls(**found | {"first_bad": tuple(found["first_bad"])}, shards=shards)
            index.check()
            return index
        except FileNotFoundError:
            what = "are not finished: run `anyformer data prepare` again" if (folder / "plan.json").exists() else None
            what = f"the shards {what}" if what else f"has no {INDEX}: no folder that `anyformer data prepare` made"
            raise wrong(folder, what) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise wrong(path, "cannot be read: it is damaged") from None


class Corpus:
    """The ids of a folder, or of a part of it.

    Files are read piece by piece and never mapped: pages that stay mapped would count as this process's memory.
    """

    def __init__(self, folder: str | Path, start: float = 0.0, stop: float = 1.0):
        self.folder = Path(folder)
        self.index = index = Index.load(self.folder)
        self._item = np.dtype(index.dtype)
        self._ends = list(itertools.accumulate(shard.tokens for shard in index.shards))
        for shard in index.shards:
            _check_size(self.folder / shard.file, shard.tokens * self._item.itemsize)
        whole = index.total("tokens")
        self._first, self._last = int(whole * start), int(whole * stop)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, {len(self):,} tokens)"

    def __len__(self) -> int:
        return self._last - self._first

    def cut(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The pieces of `length` ids from each of some places on, [n, length]; a piece may lie in several files."""
        found = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(found, np.asarray(starts).tolist(), strict=True):
            if not 0 <= start <= len(self) - length:
                raise IndexError(f"no {length} tokens from {start} on: there are {len(self)}")
            self._read(row, self._first + start)
        return found

    def _read(self, row: np.ndarray, at: int) -> None:
        done, number = 0, bisect_left(self._ends, at + 1)  # the file in which the place is
        while done < len(row):
            shard = self.index.shards[number]
            within = at + done - (self._ends[number] - shard.tokens)
            count = min(len(row) - done, shard.tokens - within)
            offset = within * self._item.itemsize
            path = self.folder / shard.file
            try:
                read = np.fromfile(path, self._item, count, offset=offset) if count else np.zeros(0)
            except OSError as error:
                raise wrong(path, f"cannot be read: {error.strerror}") from None
            if len(read) < count:
                raise wrong(path, "was cut short")
            if count and (highest := int(read.max())) >= self.index.vocabulary:
                raise wrong(path, f"holds the id {highest}, and its tokenizer has {self.index.vocabulary:,} ids")
            row[done : done + count] = read
            done, number = done + count, number + 1

    def share(self, what: str) -> int:
        """How many documents or bytes of text there are; of a file that is there in part, by its tokens."""
        found = 0.0
        for shard, end in zip(self.index.shards, self._ends, strict=True):
            inside = min(end, self._last) - max(end - shard.tokens, self._first)
            found += max(0, inside) / max(1, shard.tokens) * getattr(shard, what)
        return round(found)

    def tokenizer(self) -> TextTokenizer:
        """By which the text was read."""
        found = TextTokenizer.load(self.folder / FILE)
        if digest(found) != self.index.tokenizer:
            raise wrong(self.folder / FILE, "is not the tokenizer that the shards were made with")
        return found

    def check(self, tokenizer: TextTokenizer) -> None:
        """Refuses a tokenizer to which these ids mean something else."""
        if digest(tokenizer) != self.index.tokenizer:
            what = f"were made with another tokenizer, {visible(str(self.folder / FILE))}"
            raise wrong(self.folder, f"the shards {what}")

    def verify(self, again: bool = True) -> None:
        """Raise a `ConfigError` that names the files of this part whose SHA-256 differs from the index.

        Unless `again`, a file that had the right one and has kept its size, times and inode is not read. The user's
        cache holds these: the folder of the shards may be read-only, and a copy of it is verified itself.
        """
        cache = user_cache("shards") / f"{hashlib.sha256(os.fsencode(self.folder.resolve())).hexdigest()}.json"
        known = {} if again else _read_cache(cache)
        facts = {shard.file: _facts(self.folder, shard) for shard in self._shards()}
        left = [name for name, fact in facts.items() if known.get(name) != fact]
        with ThreadPoolExecutor(usable_cores()) as pool:
            found = list(pool.map(file_digest, (self.folder / name for name in left)))
        damaged = [name for name, digest in zip(left, found, strict=True) if facts[name][-1] != digest]
        if damaged:
            what = "is not the file that was written: it was changed or swapped"
            raise ConfigError(Fault("", f"{visible(str(self.folder / name))}: {what}") for name in damaged)
        if left:
            with suppress(OSError):
                cache.parent.mkdir(parents=True, exist_ok=True)
                write_file(cache, json.dumps(known | facts).encode())

    def _shards(self) -> list[ShardContents]:
        """Return the files that hold this part."""
        both = zip(self.index.shards, self._ends, strict=True)
        return [shard for shard, end in both if end > self._first and end - shard.tokens < self._last]


def _facts(folder: Path, shard: ShardContents) -> list[int | str]:
    """Return what changes when a file does, and the checksum that it must have."""
    found = os.stat(folder / shard.file)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, shard.sha256]


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def open_shards(source: Shards, data: Root) -> Corpus:
    """Open the token shards of a source."""
    with faults_under("path"):
        corpus = Corpus(locate(source.path, data), source.start, source.stop)
        if not len(corpus):
            raise ConfigError([Fault("", f"= {source.path!r}: there are no tokens in this part of it")])
        corpus.verify(again=False)
    return corpus


def digest(tokenizer: TextTokenizer) -> str:
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None


def _check_size(path: Path, size: int) -> None:
    try:
        found = os.path.getsize(path)
    except OSError as error:
        raise wrong(path, f"cannot be read: {error.strerror}") from None
    if found != size:
        raise wrong(path, f"is not the file that was written: it has {found:,} bytes, and had {size:,}")


def wrong(path: Path, what: str) -> ConfigError:
    return ConfigError([Fault("", f"{visible(str(path))}: {what}")])
