"""Reading examples from files: text, parallel lines, tables, lines by a pattern, folders. Imports no torch.

A row that cannot be read is a `BadRow` with its file and line, and the reading goes on, so that all of them are told at
once. Lines end at "\\n" only (or "\\r\\n"): U+2028, form feeds and the like are part of a text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data import synthetic
from anyformer.data.conll import sentences
from anyformer.data.files import File, Parsed, locate, max_bytes, open_below, open_files
from anyformer.data.shards import Corpus, open_shards
from anyformer.data.synthetic import Split
from anyformer.data.tables import LISTS, read_table
from anyformer.recipe import (
    ClassFolders,
    ConllFile,
    Data,
    JoinedSources,
    MatchedLines,
    MixedSources,
    ParallelFiles,
    Shards,
    SingleSource,
    Source,
    Synthetic,
    TableFile,
    TextFile,
)

SHOWN = 5  # bad rows that an error lists
ROLES = ("source", "target", "text", "pair", "label", "words", "tags")
GOLDEN = 2_654_435_769  # 2^32 divided by the golden ratio
T = TypeVar("T")
Encode = Callable[[list[str]], list[T]]


class BadRow(NamedTuple):
    """A row that cannot be read, and why."""

    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.why}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples by column, `source` and `target`, or `text` and what is with it: the i-th entries belong together."""

    columns: dict[str, list[str]] = field(repr=False)
    file: str
    lines: Sequence[int] = field(repr=False)  # where each row begins
    bad: tuple[BadRow, ...] = field(default=(), repr=False)  # what was left out
    files: Sequence[str] | None = field(default=None, repr=False)  # of each row, where not all are of one
    stream: Corpus | None = None  # the whole text as tokens, where it is so; then there are no columns
    kept: dict[tuple[str, Encode[Any]], list[Any]] = field(default_factory=dict, repr=False, compare=False)  # encoded

    def __len__(self) -> int:
        return len(self.lines)

    def origin(self, i: int) -> str:
        """Where the i-th row stands, as file:line."""
        return f"{self.file_of(i)}:{self.lines[i]}"

    def file_of(self, i: int) -> str:
        return self.file if self.files is None else self.files[i]

    def encoded(self, role: str, encode: Encode[T], keep: bool = False) -> list[T]:
        """A column in ids. With `keep` they stay with the rows until they are asked for again: who looks at rows before
        they are read spares the reader to encode them once more, and the reader takes them along."""
        found: list[T] | None = self.kept.pop((role, encode), None)
        ids = encode(self.columns[role]) if found is None else found
        if keep:
            self.kept[role, encode] = ids
        return ids

    def take(self, numbers: Sequence[int]) -> "Rows":
        """Some of the rows; what was left out is told with all of them only."""
        columns = {role: [values[i] for i in numbers] for role, values in self.columns.items()}
        files = None if self.files is None else [self.files[i] for i in numbers]
        kept = {key: [ids[i] for i in numbers] for key, ids in self.kept.items()}
        return Rows(columns, self.file, [self.lines[i] for i in numbers], (), files, kept=kept)

    def without(self, bad: Mapping[int, str]) -> "Rows":
        """The rows less those that turned out to be bad, each with its reason."""
        if not bad:
            return self
        more = (BadRow(self.file_of(i), self.lines[i], why) for i, why in bad.items())
        return replace(self.take([i for i in range(len(self)) if i not in bad]), bad=(*self.bad, *more))


def read(source: Source, data: Data, split: Split, seed: int) -> Rows:
    """The rows of a source. The seed matters to invented training rows only."""
    try:
        rows = _read(source, data, split, seed)
    except ConfigError as error:
        raise ConfigError(fault.under(f"data.{split}") for fault in error.faults) from None
    return settled(rows, data, split)


def settled(rows: Rows, data: Data, split: Split) -> Rows:
    """The rows, or a `ConfigError` where bad ones are not to be left out, or none is good."""
    place = f"data.{split}"
    if rows.bad and data.on_bad_row == "error":
        raise ConfigError(_told(rows, place))
    if not len(rows):
        why = f"; all {len(rows.bad)} are bad, the first: {rows.bad[0]}" if rows.bad else ""
        raise ConfigError([Fault(place, f"no rows in {rows.file}{why}")])
    return rows


def _told(rows: Rows, place: str) -> Iterator[Fault]:
    count = len(rows.bad)
    found = f"{count} bad row{'s' if count > 1 else ''} beside {len(rows)} good"
    yield Fault(place, f'{found}: mend them, or leave them out by data.on_bad_row = "skip"')
    yield from (Fault("", str(bad)) for bad in rows.bad[:SHOWN])
    if count > SHOWN:
        yield Fault("", f"... and {count - SHOWN} more")


def _read(source: Source, data: Data, split: Split, seed: int) -> Rows:
    match source:
        case TextFile():
            file = open_files(source, data, "path")["path"]
            return _collect(_documents(source, file), {"text": file})
        case ParallelFiles():
            files = open_files(source, data, "source", "target")
            return _collect(_part(source, _parallel(files)), files)
        case TableFile():
            wanted = {role: name for role in ROLES if (name := getattr(source, role)) is not None}
            if not wanted:
                raise ConfigError([Fault("", "names no column: give `source` and `target`, or `text`")])
            file, rows = read_table(source, data, wanted)
            return _collect(_part(source, rows), dict.fromkeys(wanted, file))
        case MatchedLines():
            pattern = re.compile(source.pattern)
            file = open_files(source, data, "path")["path"]
            roles = [role for role in ROLES if role in pattern.groupindex]
            return _collect(_part(source, _matched(pattern, file)), dict.fromkeys(roles, file))
        case ConllFile():
            file = open_files(source, data, "path")["path"]
            tagged = _collect(_part(source, sentences(source, file)), {"words": file, "tags": file})
            tagged.columns["text"] = [words.replace("\n", " ") for words in tagged.columns["words"]]
            return tagged
        case ClassFolders():
            return _labelled(source, data)
        case JoinedSources(parts=parts):
            return joined([_within(f"parts.{i}", part, data, split, seed) for i, part in enumerate(parts)])
        case MixedSources(parts=mixed):
            found = [_within(f"parts.{i}.rows", part.rows, data, split, seed) for i, part in enumerate(mixed)]
            for one, of_it in zip(mixed, found, strict=True):
                of_it.columns["task"] = [one.name] * len(of_it)
            return joined(found)
        case Shards():
            corpus = open_shards(source, data)
            documents = max(1, corpus.share("documents"))
            return Rows({}, visible(str(corpus.folder)), range(1, documents + 1), stream=corpus)
        case _:
            return _invented(source, split, seed)


def _invented(source: Synthetic, split: Split, seed: int) -> Rows:
    columns = synthetic.generate(source, split, seed)
    return Rows(columns, f"{source.kind} ({split})", range(1, source.count + 1))


# -- rows -------------------------------------------------------------------------------------------------------------


def _collect(parsed: Parsed, files: dict[str, File]) -> Rows:
    """Rows without the bad ones; a column is read from its file."""
    columns: dict[str, list[str]] = {role: [] for role in files}
    lines, bad = list[int](), list[BadRow]()
    first = next(iter(files.values()))
    held, most = 0, max_bytes()
    for line, row in parsed:
        if isinstance(row, str):
            bad.append(BadRow(first.name, line, row))
            continue
        for role, file in files.items():
            blank = not row[role].strip() and role != "label"  # no label at all may be one
            if why := file.flaw(row[role]) or (f"the {role} {'are' if role in LISTS else 'is'} empty" if blank else ""):
                bad.append(BadRow(file.name, line, why))
                break
        else:
            lines.append(line)
            for role, values in columns.items():
                values.append(row[role])
                held += len(row[role])
            if held > most:
                what = f"the rows have more than {most / 2**20:,.0f} MiB of text, as this machine's memory allows"
                raise ConfigError([Fault("", f"{first.name}:{line}: {what}")])
    return Rows(columns, first.name, lines, tuple(bad))


def _within(place: str, source: SingleSource, data: Data, split: Split, seed: int) -> Rows:
    """The rows of a source that is a part of another."""
    try:
        return _read(source, data, split, seed)
    except ConfigError as error:
        raise ConfigError(fault.under(place) for fault in error.faults) from None


def joined(parts: Sequence[Rows], file: str | None = None) -> Rows:
    """The rows of several sources, one after the other, with the columns that all of them have."""
    file = file or ", ".join(dict.fromkeys(part.file for part in parts))
    roles = [role for role in parts[0].columns if all(role in part.columns for part in parts)]
    columns = {role: [value for part in parts for value in part.columns[role]] for role in roles}
    lines = [line for part in parts for line in part.lines]
    bad = tuple(row for part in parts for row in part.bad)
    return Rows(columns, file, lines, bad, [part.file_of(i) for part in parts for i in range(len(part))])


def _part(
    source: ParallelFiles | TableFile | MatchedLines | ConllFile | ClassFolders, parsed: Iterable[T]
) -> Iterator[T]:
    """The rows from `start` to `stop` when they are dealt out by multiples of the golden ratio.

    These fill the interval evenly from any row on and at any stride, so a file that is sorted, or repeats itself, gives
    each part its share of everything; and a row stays in its part when others are added behind it.
    """
    start, stop = int(source.start * 2**32), int(source.stop * 2**32)
    return (row for n, row in enumerate(parsed) if start <= n * GOLDEN % 2**32 < stop)


def _documents(source: TextFile, file: File) -> Parsed:
    """The part from `start` to `stop`; a line is in the part that its first character is in."""
    text = file.text.replace("\r\n", "\n")
    start, stop = int(len(text) * source.start), int(len(text) * source.stop)
    if source.document == "line":
        at = 0
        for number, line in enumerate(text.split("\n"), 1):
            if start <= at < stop and line.strip():
                yield number, {"text": line}
            at += len(line) + 1
        return
    part, first = text[start:stop], 1 + text.count("\n", 0, start)
    good = []
    for number, line in enumerate(part.split("\n"), first):
        if why := file.flaw(line):
            yield number, why
        else:
            good.append(line)
    if any(map(str.strip, good)):
        yield first, {"text": "\n".join(good)}


def _parallel(files: dict[str, File]) -> Parsed:
    sources, targets = files["source"].lines(), files["target"].lines()
    if len(sources) != len(targets):
        counts = f"{files['source'].name} has {len(sources)} lines, {files['target'].name} has {len(targets)}"
        raise ConfigError([Fault("", f"{counts}: parallel files must have as many lines each")])
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        yield number, {"source": source, "target": target}


def _matched(pattern: re.Pattern[str], file: File) -> Parsed:
    for number, line in enumerate(file.lines(), 1):
        if not line:
            continue
        if why := file.flaw(line):
            yield number, why
        elif found := pattern.fullmatch(line):
            yield number, {role: value or "" for role, value in found.groupdict().items()}
        else:
            yield number, f"does not match the pattern: {line[:40]!r}"


# -- folders ----------------------------------------------------------------------------------------------------------


def _labelled(source: ClassFolders, data: Data) -> Rows:
    """A text for each file, by name; what stands around it is cut off, ends of lines inside it are kept."""
    found = []
    for path in _part(source, _members(source, data)):
        file, label = open_below(source, path), path.parent.name
        text = file.text.replace("\r\n", "\n")
        flaws = ((number, why) for number, line in enumerate(text.split("\n"), 1) if (why := file.flaw(line)))
        row: tuple[int, dict[str, str] | str] = next(flaws, (1, {"text": text.strip(), "label": label}))
        found.append(_collect(iter([row]), {"text": file, "label": file}))
    shown = visible(source.path)
    return joined(found, shown) if found else Rows({"text": [], "label": []}, shown, [])


def _members(source: ClassFolders, data: Data) -> list[Path]:
    """The files of all classes, in the order of their names; hidden ones are none of them."""

    def told(what: str) -> ConfigError:
        return ConfigError([Fault("path", f"= {source.path!r}: {what}")])

    try:
        root = locate(source.path, data)
        if not root.is_dir():
            raise told(f"{visible(str(root))} is not a folder")
        classes = [folder for folder in _visible(root) if folder.is_dir()]
        if not classes:
            raise told(f"no folder in {visible(str(root))}: each class is one, and each of its files a text")
        members = []
        for folder in classes:
            inside = _visible(folder)
            if not inside:
                raise told(f"no file in {visible(str(folder))}: each file in the folder of a class is a text")
            if deeper := [path for path in inside if path.is_dir()]:
                raise told(f"{visible(str(deeper[0]))} is a folder within a class, which is one folder of files")
            members += inside
    except OSError as error:
        raise told(f"cannot be read ({error.strerror})") from None
    return members


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
