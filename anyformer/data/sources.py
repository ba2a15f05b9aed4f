"""Reading examples from files: text, parallel lines, tables, lines by a pattern. Imports no torch.

A row that cannot be read is a `BadRow` with its file and line, and the reading goes on, so that all of them are told at
once. Lines end at "\\n" only (or "\\r\\n"): U+2028, form feeds and the like are part of a text.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anyformer.config.spec import ConfigError, Fault, did_you_mean
from anyformer.data import synthetic
from anyformer.data.files import FLAW, File, open_files, unfit
from anyformer.data.synthetic import Split
from anyformer.recipe import Data, MatchedLines, ParallelFiles, Source, Synthetic, TableFile, TextFile

SHOWN = 5  # bad rows that an error lists
ROLES = ("source", "target", "text", "pair", "label")
GOLDEN = 2_654_435_769  # 2^32 divided by the golden ratio


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

    def __len__(self) -> int:
        return len(self.lines)

    def origin(self, i: int) -> str:
        """Where the i-th row stands, as file:line."""
        return f"{self.file}:{self.lines[i]}"

    def without(self, bad: Mapping[int, str]) -> "Rows":
        """The rows less those that turned out to be bad, each with its reason."""
        if not bad:
            return self
        kept = [i for i in range(len(self)) if i not in bad]
        columns = {role: [values[i] for i in kept] for role, values in self.columns.items()}
        more = (BadRow(self.file, self.lines[i], why) for i, why in bad.items())
        return Rows(columns, self.file, [self.lines[i] for i in kept], (*self.bad, *more))


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
            form = _format(source)
            file = open_files(source, data, "path")["path"]
            rows = _objects(source, file, wanted) if form == "jsonl" else _table(source, file, wanted, form)
            return _collect(_part(source, rows), dict.fromkeys(wanted, file))
        case MatchedLines():
            pattern = re.compile(source.pattern)
            file = open_files(source, data, "path")["path"]
            roles = [role for role in ROLES if role in pattern.groupindex]
            return _collect(_part(source, _matched(pattern, file)), dict.fromkeys(roles, file))
        case _:
            return _invented(source, split, seed)


def _invented(source: Synthetic, split: Split, seed: int) -> Rows:
    columns = synthetic.generate(source, split, seed)
    return Rows(columns, f"{source.kind} ({split})", range(1, source.count + 1))


# -- rows -------------------------------------------------------------------------------------------------------------

# A reader gives the line, and a value for each column or the reason why there is none.
Parsed = Iterator[tuple[int, dict[str, str] | str]]


def _collect(parsed: Parsed, files: dict[str, File]) -> Rows:
    """Rows without the bad ones; a column is read from its file."""
    columns: dict[str, list[str]] = {role: [] for role in files}
    lines, bad = list[int](), list[BadRow]()
    first = next(iter(files.values()))
    for line, row in parsed:
        if isinstance(row, str):
            bad.append(BadRow(first.name, line, row))
            continue
        for role, file in files.items():
            blank = not row[role].strip() and role != "label"  # no label at all may be one
            if why := file.flaw(row[role]) or (f"the {role} is empty" if blank else ""):
                bad.append(BadRow(file.name, line, why))
                break
        else:
            lines.append(line)
            for role, values in columns.items():
                values.append(row[role])
    return Rows(columns, first.name, lines, tuple(bad))


def _part(source: ParallelFiles | TableFile | MatchedLines, parsed: Parsed) -> Parsed:
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


# -- tables -----------------------------------------------------------------------------------------------------------


def _format(source: TableFile) -> str:
    name = source.path.lower().removesuffix(".gz")
    form = source.format or next((form for form in ("tsv", "csv", "jsonl") if name.endswith(f".{form}")), None)
    if form is None:
        known = "must be 'tsv', 'csv' or 'jsonl'"
        raise ConfigError([Fault("format", f"cannot be told from the name {source.path!r}: {known}")])
    return form


def _table(source: TableFile, file: File, wanted: dict[str, str], form: str) -> Parsed:
    """Cells by the names in the first row, or by number; empty lines are no rows."""
    names: list[str] | None = None
    for number, cells in _csv(file.text) if form == "csv" else _tsv(file):
        if why := cells if isinstance(cells, str) else file.flaw("\t".join(cells)):
            if names is None and source.header:
                raise ConfigError([Fault("path", f"the header cannot be read: {file.name}:{number}: {why}")])
            yield number, why
        elif names is None:
            names = list(cells) if source.header else [str(i) for i in range(len(cells))]
            places = _places(names, wanted, file)
            if not source.header:
                yield number, {role: cells[place] for role, place in places.items()}
        elif len(cells) != len(names):
            yield number, f"has {len(cells)} columns, the first row has {len(names)}"
        else:
            yield number, {role: cells[place] for role, place in places.items()}


def _places(names: list[str], wanted: dict[str, str], file: File) -> dict[str, int]:
    faults = []
    for role, name in wanted.items():
        if name not in names:
            faults.append(Fault(role, f"= {name!r}: no such column in {file.name}; {did_you_mean(name, names)}"))
        elif names.count(name) > 1:
            faults.append(Fault(role, f"= {name!r}: {names.count(name)} columns of {file.name} have this name"))
    if faults:
        raise ConfigError(faults)
    return {role: names.index(name) for role, name in wanted.items()}


def _tsv(file: File) -> Iterator[tuple[int, list[str] | str]]:
    """Tabs apart; a quote is a character like any other."""
    return ((number, line.split("\t")) for number, line in enumerate(file.lines(), 1) if line)


def _csv(text: str) -> list[tuple[int, list[str] | str]]:
    """Records, or why there is none. After a bad one the reading goes on at its second line: a quote that is never
    closed does not swallow what follows."""
    found: list[tuple[int, list[str] | str]] = []
    lines = [f"{line}\n" for line in text.split("\n")]
    start, limit = 0, csv.field_size_limit(max(len(text), csv.field_size_limit()))
    try:
        while start < len(lines):
            reader = csv.reader(map(lines.__getitem__, range(start, len(lines))), strict=True)
            done = 0
            try:
                for cells in reader:
                    if cells:
                        found.append((start + done + 1, cells))
                    done = reader.line_num
            except csv.Error as error:
                found.append((start + done + 1, _csv_reason(str(error))))
                done += 1
            start += done
    finally:
        csv.field_size_limit(limit)
    return found


def _csv_reason(message: str) -> str:
    if message.startswith("unexpected end"):
        return "a quote is opened and never closed"
    if message.startswith("new-line character"):
        return "a carriage return stands outside quotes"
    return f"not valid CSV: {message}"


def _objects(source: TableFile, file: File, wanted: dict[str, str]) -> Parsed:
    """JSON, one object a line; without a header one list a line. Numbers stay as they are written."""
    seen: set[str] = set()
    for number, line in enumerate(file.lines(), 1):
        if not line:
            continue
        fields = file.flaw(line) or _object(line, source.header)
        if isinstance(fields, str):
            yield number, fields
        else:
            seen.update(fields)
            why = next(filter(None, (_wrong(fields, name) for name in wanted.values())), "")
            yield number, why or {role: fields[name] for role, name in wanted.items()}
    if seen:  # a field that no row has is a wrong name rather than so many bad rows
        _places(sorted(seen), wanted, file)


def _object(line: str, named: bool) -> dict[str, Any] | str:
    """The fields of a line of JSON, or why there are none."""
    try:
        value = json.loads(line, parse_int=str, parse_float=str, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        return f"not valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"
    if named:
        return value if isinstance(value, dict) else "not a JSON object"
    return {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else "not a JSON list"


def _no_number(word: str) -> str:
    raise ValueError(f"{word} is no JSON")


def _wrong(fields: dict[str, Any], name: str) -> str:
    """Why a field is no text; empty if it is."""
    if name not in fields:
        return f"has no field {name!r}"
    value = fields[name]
    if not isinstance(value, str):
        return f"the field {name!r} is {json.dumps(value)[:40]}: must be a string or a number"
    found = FLAW.search(value)
    return unfit(found[0]) if found else ""
