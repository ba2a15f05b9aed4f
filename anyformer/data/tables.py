"""Reading tables: cells, and records with named fields. Imports no torch.

A column of records may lie within another: `meta.title`, `translations.0.text`.
"""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from anyformer.config.spec import ConfigError, Fault, did_you_mean, faults_under
from anyformer.data.conversations import MESSAGES, alternate, prompt_and_answers
from anyformer.data.delimited import other_delimiter, read_csv, separated
from anyformer.data.files import FLAW, File, Parsed, locate, open_files, regular, unfit
from anyformer.data.fingerprint import of_files
from anyformer.data.media_rows import with_references
from anyformer.data.readers import LISTS, Rows, collect, selected
from anyformer.recipe import FORMATS, ColumnName, ColumnNames, Root, TableFile, TableFormat, single_columns

DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?")


def table_rows(source: TableFile, data: Root, by: str | None) -> Rows:
    """Return the rows of a table."""
    names = {**source.columns(), **({} if by is None else {"by": by})}
    group = "group" if "group" in names else None
    roles = [role for role in names if role != group]
    if source.holds_answers:
        roles = list(dict.fromkeys([MESSAGES, *roles]))
    if not roles:
        raise ConfigError([Fault("", "names no column: set `source` and `target`, or `text`")])
    file, rows = read_table(source, data, names)
    return collect(selected(source, rows, group), dict.fromkeys(roles, file))


def read_table(source: TableFile, data: Root, columns: dict[str, ColumnNames]) -> tuple[File, Parsed]:
    """The rows of a table by role; `columns` names the column of each, or several that are joined."""
    file, rows = _read_single(source, data, single_columns(columns))
    if source.decimal == "," and "label" in columns:
        rows = _with_decimal_points(rows)
    kinds = source.media()
    if media := {key: kinds[name] for key, name in single_columns(columns).items() if name in kinds}:
        rows = with_references(rows, media, locate(source.path, data).parent)
    joined = {role: len(names) for role, names in columns.items() if isinstance(names, tuple)}
    rows = _joined(rows, joined, source.join) if joined else rows
    if source.holds_answers:
        rows = ((number, row if isinstance(row, str) else prompt_and_answers(row)) for number, row in rows)
    return file, rows


def media_fingerprints(source: TableFile, data: Root) -> Iterator[tuple[str, str]]:
    """Yield the fingerprints of the files whose paths are in columns of a table, together, by the key of the columns.

    A file that is missing is a bad row, which is reported when the rows are read.
    """
    for name, columns in (("images", source.images), ("sounds", source.sounds)):
        if columns is None:
            continue
        plain = source.model_copy(update={"images": None, "sounds": None})  # cells as they are
        _, rows = read_table(plain, data, dict(single_columns({name: columns})))
        folder, cells = locate(source.path, data).parent, set[str]()
        for _, row in rows:
            if not isinstance(row, str):
                cells.update(part.partition("#")[0] for cell in row.values() for part in cell.split("+"))
        files = sorted(path for cell in cells if (path := folder / cell.strip()).is_file())
        yield name, of_files((str(path), path) for path in files)


def _joined(rows: Parsed, joined: dict[str, int], between: str) -> Parsed:
    """Yield rows with columns that are joined from others, without blank cells; messages become a conversation."""
    for number, row in rows:
        if not isinstance(row, str):
            for role, count in joined.items():
                cells = [row.pop(f"{role}.{i}") for i in range(count)]
                if role == MESSAGES:
                    row[role] = alternate(cells)
                else:
                    row[role] = between.join(cell for cell in cells if cell.strip())
        yield number, row


def _with_decimal_points(rows: Parsed) -> Parsed:
    """Yield rows whose labels, numbers such as 1.234,5, are written as in Python."""
    for number, row in rows:
        if isinstance(row, str):
            yield number, row
        elif DECIMAL_COMMA.fullmatch(label := row["label"].strip()):
            yield number, {**row, "label": label.replace(".", "").replace(",", ".")}
        else:
            yield number, f"the label {label[:40]!r} is no number with a decimal comma"


def _read_single(source: TableFile, data: Root, columns: dict[str, ColumnName]) -> tuple[File, Parsed]:
    """The rows of a table by the keys of single columns."""
    if source.form is None:
        raise ConfigError([source.unknown_format()])
    form, wanted = FORMATS[source.form], {role: str(name) for role, name in columns.items()}
    if form.reader:
        path = _regular(source, data, form)
        table, file = open_table(path, form), File(str(path), "utf-8", "")
        records = table.rows(wanted_columns(table.names, path, wanted), into_memory=True)
    else:
        file = open_files(source, data, "path")["path"]
        if not form.is_records:
            return file, _cells(source, file, columns, source.form)
        records = _objects(source, file)
    return file, _rows(records, wanted, file.name, source.holds_answers)


# -- cells ------------------------------------------------------------------------------------------------------------


def _cells(source: TableFile, file: File, wanted: dict[str, ColumnName], form: str) -> Parsed:
    """Cells by the names in the first row, or by number; empty lines are no rows."""
    names: list[str] | None = None
    delimiter = source.delimiter if form == "csv" else "\t"
    for number, cells in read_csv(file.text, delimiter) if form == "csv" else _tsv(file):
        if why := cells if isinstance(cells, str) else file.flaw("\t".join(cells)):
            if names is None and source.header:
                raise ConfigError([Fault("path", f"the header cannot be read: {file.name}:{number}: {why}")])
            yield number, why
        elif names is None:
            names = list(cells) if source.header else [str(i) for i in range(len(cells))]
            places = _places(names, wanted, file.name, form, delimiter)
            if not source.header:
                yield number, {role: _cell(cells[place], role) for role, place in places.items()}
        elif len(cells) != len(names):
            yield number, f"has {len(cells)} columns, the first row has {len(names)}, {separated(delimiter)}"
        else:
            yield number, {role: _cell(cells[place], role) for role, place in places.items()}


def _cell(cell: str, role: str) -> str:
    """Return a cell; in columns of words, which are separated by spaces, with one word per line."""
    return "\n".join(filter(None, cell.split(" "))) if role in LISTS else cell


def _places(names: list[str], wanted: dict[str, ColumnName], path: str, form: str, delimiter: str) -> dict[str, int]:
    """Return the number of each column."""
    faults, file, hint = list[Fault](), f"{path}, {separated(delimiter)}", other_delimiter(names, form)
    for role, name in wanted.items():
        if isinstance(name, int):
            if name >= len(names):
                columns = (
                    f"{len(names)} columns, numbered from 0 to {len(names) - 1}" if len(names) > 1 else "only column 0"
                )
                faults.append(Fault(role, f"= {name}: {file}, has {columns}{hint}"))
        elif name not in names:
            faults.append(Fault(role, f"= {name!r}: no such column in {file}; {did_you_mean(name, names)}{hint}"))
        elif names.count(name) > 1:
            faults.append(Fault(role, f"= {name!r}: {names.count(name)} columns of {path} have this name"))
    if faults:
        raise ConfigError(faults)
    return {role: name if isinstance(name, int) else names.index(name) for role, name in wanted.items()}


def _tsv(file: File) -> Iterator[tuple[int, list[str] | str]]:
    """Tabs apart; a quote is a character like any other."""
    return ((number, line.split("\t")) for number, line in enumerate(file.lines(), 1) if line)


# -- records ----------------------------------------------------------------------------------------------------------

Records = Iterator[tuple[int, dict[str, Any] | str]]  # the line, and the fields or the reason why there are none


def _rows(records: Records, wanted: dict[str, str], file: str, answers: bool) -> Parsed:
    """The columns of records, as text; with `answers`, lists of messages as JSON, in `target.messages`."""
    nowhere: dict[str, Missing] = {}
    seen: set[str] = set()
    for number, fields in records:
        if isinstance(fields, str):
            yield number, fields
            continue
        row: dict[str, str] = {}
        reasons = []
        for role, path in wanted.items():
            value = follow(fields, path)
            if isinstance(value, Missing):
                nowhere[role] = value.beside(nowhere.get(role, value))
                reasons.append(value.told(path))
                continue
            seen.add(role)
            is_list = answers and isinstance(value, list) and role in ("target", "rejected")
            text, why = spelt(value, path, MESSAGES if is_list else role)
            row[f"{role}.{MESSAGES}" if is_list else role] = text
            reasons += [why] if why else []
        yield number, reasons[0] if reasons else row
    # a field that no row has is a wrong name, not a set of bad rows
    if faults := [Fault(role, lost.fault(wanted[role], file)) for role, lost in nowhere.items() if role not in seen]:
        raise ConfigError(faults)


class Missing(NamedTuple):
    """The missing end of a path, and the files there."""

    at: str  # the path as far as it goes
    key: str
    known: frozenset[str]

    def beside(self, other: "Missing") -> "Missing":
        """Return the row whose path goes further, or both."""
        if self.at == other.at:
            return self._replace(known=self.known | other.known)
        return max(self, other, key=lambda lost: len(lost.at))

    def told(self, path: str) -> str:
        return f"has no field {path!r}" + (f": {self.at!r} has no {self.key!r}" if self.at else "")

    def fault(self, path: str, file: str) -> str:
        where = f": {self.at!r} has no {self.key!r}" if self.at else ""
        hint = did_you_mean(self.key, self.known) if self.known else "nothing lies within it"
        return f"= {path!r}: no such column in {file}{where}; {hint}"


def follow(value: Any, path: str, at: str = "") -> Any:
    """Return the value at the end of a path, or `Missing`. A field whose name contains dots takes precedence."""
    inner = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else value
    if not isinstance(inner, dict):
        inner = {}
    if path in inner:
        return inner[path]
    steps, lost = path.split("."), None
    for n in range(len(steps) - 1, 0, -1):
        key = ".".join(steps[:n])
        if key in inner:
            found = follow(inner[key], ".".join(steps[n:]), f"{at}.{key}" if at else key)
            if not isinstance(found, Missing):
                return found
            lost = lost or found
    return lost or Missing(at, steps[0], frozenset(inner))


def spelt(value: Any, path: str, role: str) -> tuple[str, str]:
    """A value as text, and why it is none; of columns of words a list, one word a line."""
    if isinstance(value, list) and role in LISTS:
        if any(not isinstance(word, str) or "\n" in word for word in value):
            return "", f"the field {path!r} is {_shown(value)}: must be a list of strings, each of one line"
        value = "\n".join(value)
    elif isinstance(value, list) and role == MESSAGES:
        value = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, str):
        value = _cell(value, role)
    if not isinstance(value, str):
        kinds = {MESSAGES: "a list of messages", **dict.fromkeys(LISTS, "a list of strings")}
        kind = kinds.get(role, "a string or a number")
        return "", f"the field {path!r} is {_shown(value)}: must be {kind}"
    found = FLAW.search(value)
    return value, unfit(found[0]) if found else ""


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:40]


def _objects(source: TableFile, file: File) -> Records:
    for number, line in enumerate(file.lines(), 1):
        if line:
            yield number, file.flaw(line) or parse_object(line, source.header)


def parse_object(line: str, named: bool = True) -> dict[str, Any] | str:
    """The fields of a line of JSON, or why there are none: of an object, or by number of a list. Numbers stay as they
    are written."""
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


# -- files that are no text -------------------------------------------------------------------------------------------


class OpenTable(Protocol):
    """A file that is no text, open for reading."""

    names: list[str]  # of its columns
    count: int  # rows

    def rows(self, columns: list[str], into_memory: bool = False) -> Records:
        """Yield rows by number from 1, some columns of them; refuse those that are too large to be held."""


def open_table(path: Path, form: TableFormat) -> OpenTable:
    """Open a file by the reader of its format."""
    found: OpenTable = import_module(f"anyformer.data.{form.reader}").Reader(path)
    return found


def _regular(source: TableFile, data: Root, form: TableFormat) -> Path:
    if source.encoding != "utf-8":
        raise ConfigError([Fault("encoding", f"= {source.encoding!r}: text in {form.title} is utf-8 always")])
    if not source.header:
        raise ConfigError([Fault("header", f"= false: columns of {form.title} have names always")])
    with faults_under("path"):
        return regular(source.path, data)


def wanted_columns(names: list[str], path: Path, wanted: dict[str, str]) -> list[str]:
    """The columns in which those lie that are wanted, by role."""
    faults = [
        Fault(role, Missing("", name.partition(".")[0], frozenset(names)).fault(name, str(path)))
        for role, name in wanted.items()
        if not _beginnings(name) & {*names}
    ]
    if faults:
        raise ConfigError(faults)
    beginnings = set[str]().union(*map(_beginnings, wanted.values()))
    return [name for name in names if name in beginnings]


def _beginnings(path: str) -> set[str]:
    steps = path.split(".")
    return {".".join(steps[: n + 1]) for n in range(len(steps))}
