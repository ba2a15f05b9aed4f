"""Read and write any spec as TOML or JSON; also exports overrides, differences and the schema. Imports no torch.

    loads(cls, dumps(spec)) == spec, for every spec of class `cls`

None only ever means "follows from the others", so it is left out; everything else is written, defaults too, so that a
file keeps its meaning when a default changes. TOML writes a part that is only its kind as that word (`norm = "rms"`).
"""

import json
import os
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w

from anyformer.config.outside import check_record, record_of
from anyformer.config.overrides import DEEPEST, diff as diff, merge as merge, override as override
from anyformer.config.parse import build as build, to_data as to_data
from anyformer.config.schema import schema as schema
from anyformer.config.spec import ConfigError, Fault, Spec, close_file, fields, kinds, member_for, members, visible

S = TypeVar("S", bound=Spec)
Format = Literal["toml", "json"]
MAX_FILE = 2**23  # bytes
MAX_BITS = 4096  # of a whole number: Python writes none of more than 4,300 decimal digits
SUFFIXES: dict[str, Format] = {".toml": "toml", ".json": "json"}


def dumps(spec: Spec, format: Format = "toml") -> str:
    """Return the spec as text, which `loads` parses."""
    if format == "json":
        return json.dumps(to_data(spec), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return tomli_w.dumps(_by_word(type(spec), to_data(spec)))


def loads(cls: type[S], text: str, format: Format = "toml") -> S:
    """Return the spec in a text. Raise a `ConfigError` with all its faults."""
    return build(cls, parse(text, format))


def save(spec: Spec, path: str | Path) -> None:
    """Write .toml or .json, by the suffix, atomically."""
    path = Path(path)
    text = dumps(spec, format_of(path))
    try:
        write_file(path, text.encode())
    except OSError as error:
        raise ConfigError([Fault(str(path), f"cannot be written: {error.strerror}")]) from None


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically, synced to disk."""
    temporary = path.with_name(f".anyformer-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        if os.path.exists(temporary):  # `unlink` fails where the parent is a file
            temporary.unlink()


def load(cls: type[S], path: str | Path) -> S:
    """Read .toml or .json, by the suffix; a `ConfigError` names the file in every fault."""
    tables = read_tables(path)
    check_record(record_of(Path(path)))
    with faults_in(path):
        return build(cls, tables)


def read_tables(path: str | Path) -> dict[str, Any]:
    """Return the tables in a .toml or .json file; a `ConfigError` names the file in every fault."""
    path = Path(path)
    if os.path.isdir(path):  # unlike Path.is_dir, it accepts any name
        raise ConfigError([Fault(str(path), "is a folder, not a file")])
    format, text = format_of(path), read_text(path)
    with faults_in(path):
        return parse(text, format)


@contextmanager
def faults_in(path: str | Path) -> Iterator[None]:
    """Name a file in every fault of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            Fault(f"{path}: {fault.path}" if fault.path else str(path), fault.message) for fault in error.faults
        ) from None


def format_of(path: Path) -> Format:
    """Return the format of a file by its suffix."""
    if format := SUFFIXES.get(path.suffix.lower()):
        return format
    has = f"'{path.suffix}'" if path.suffix else "no suffix"
    raise ConfigError([Fault(str(path), f"has {has}: a config ends in {' or '.join(SUFFIXES)}")])


def read_text(path: Path) -> str:
    """Return the text of a config file, of at most `MAX_FILE` bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE + 1)
        if len(raw) > MAX_FILE:
            raise ConfigError([Fault(str(path), f"is too large: a config has at most {MAX_FILE:,} bytes")])
        return raw.decode("utf-8-sig")  # with or without the mark that Windows editors write
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
    except FileNotFoundError:
        close = close_file(path, SUFFIXES)
        what = "no such file" + (f"; did you mean '{close}'?" if close else "")
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise ConfigError([Fault(str(path), what)])


# -- text to plain data ---------------------------------------------------------------------------------------------


def parse(text: str, format: Format) -> dict[str, Any]:
    """Return the tables in a text. Raise a `ConfigError` with the line and column of a syntax error."""
    try:
        if format == "toml" and _has_deep_key(text):
            raise RecursionError
        data = tomllib.loads(text) if format == "toml" else json.loads(text, object_pairs_hook=_object)
        found = list(_unreadable(data, ""))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_toml_fault(str(error), text)]) from None
    except json.JSONDecodeError as error:
        what = error.msg[:1].lower() + error.msg[1:]
        raise ConfigError([Fault(f"line {error.lineno}, column {error.colno}", what)]) from None
    except RecursionError:
        raise ConfigError([Fault("", "nested too deeply")]) from None
    except ValueError as error:  # Python reads no whole number of more than 4,300 digits
        raise ConfigError([Fault("", str(error).partition(";")[0])]) from None
    if not isinstance(data, dict):
        found = [Fault("", "must be a table: { ... }")]
    if found:
        raise ConfigError(found)
    return data


# Strings and comments of TOML: the dots in them are no paths.
_QUOTED = re.compile(r'''"""(?:[^\\]|\\.)*?"""|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|#[^\n]*''', re.DOTALL)


def _has_deep_key(text: str) -> bool:
    """Return whether a dotted key has more than `DEEPEST` dots: `tomllib` takes quadratic time for them."""
    bare = _QUOTED.sub("''", text)
    return any(run[0].count(".") > DEEPEST for run in re.finditer(r"[^\n=,\[\]{}]+", bare))


def _toml_fault(message: str, text: str) -> Fault:
    if at := re.search(r" \(at line (\d+), column (\d+)\)$", message):
        line, column = at.groups()
        message = message[: at.start()]
    else:
        last = text.split("\n")
        line, column = str(len(last)), str(len(last[-1]) + 1)
        message = message.replace(" (at end of document)", "")
    return Fault(f"line {line}, column {column}", message[:1].lower() + message[1:])


class _Object(dict[str, Any]):
    """JSON object that records its repeated keys."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    table = _Object(pairs)
    if len(table) < len(pairs):
        times = Counter(key for key, _ in pairs)
        table.repeated = tuple(key for key in table if times[key] > 1)
    return table


def _unreadable(data: Any, path: str) -> Iterator[Fault]:
    """Yield faults of values that parsers accept but that cannot be written: repeated keys, lone surrogates, and whole
    numbers of more than `MAX_BITS`, of which hexadecimal ones may have any length."""
    if isinstance(data, _Object):
        yield from (Fault(_join(path, key), "is given more than once") for key in data.repeated)
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _unreadable(key, _join(path, key))
            yield from _unreadable(value, _join(path, key))
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield from _unreadable(value, _join(path, str(i)))
    elif isinstance(data, str) and data != visible(data):
        yield Fault(path, f"holds half a character (a lone surrogate): '{visible(data)}'")
    elif isinstance(data, int) and data.bit_length() > MAX_BITS:
        yield Fault(path, f"is a whole number of {data.bit_length():,} bits: must have at most {MAX_BITS}")


def _join(path: str, key: str) -> str:
    return f"{path}.{visible(key)}" if path else visible(key)


# -- plain data to text ---------------------------------------------------------------------------------------------


def _by_word(annotation: Any, data: Any) -> Any:
    """Replace each table that holds only a kind by the kind, where the kind selects the member of a union."""
    if isinstance(data, list):
        return [_by_word(annotation, value) for value in data]
    if not isinstance(data, dict):
        return data
    if data.keys() == {"kind"} and len(kinds(members(annotation))) > 1:
        return data["kind"]
    known = fields(member_for(annotation, data))
    return {key: _by_word(known[key].annotation, value) if key in known else value for key, value in data.items()}
