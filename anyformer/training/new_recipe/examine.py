"""The format of a file: table, CoNLL, labelled lines, plain text, or folders by class. Imports no torch."""

import codecs
import itertools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.delimited import DELIMITERS, read_csv
from anyformer.data.files import TEXT_SUFFIXES, File, files_below, is_text_file, read_bytes
from anyformer.data.tables import DECIMAL_COMMA, open_table, parse_object
from anyformer.recipe import FORMATS, TableFormat

MAX_ROWS = 20_000  # of a table that are examined
SNIFFED = 2**16  # characters of a CSV by which its delimiter is found
MAX_SHOWN = 30  # characters of an example in a message
MIN_ALIKE = 0.95  # share of lines with the same number of separators
CONLL = ("conll", "conllu", "iob", "iob2", "bio", "bioes")
COLUMN_NAMES: dict[str, list[str]] = tomllib.loads(
    (resources.files("anyformer.training.new_recipe") / "column_names.toml").read_text(encoding="utf-8")
)
HEADER_WORDS = frozenset(name for names in COLUMN_NAMES.values() for name in names)

Kind = Literal["table", "conll", "labelled", "text", "texts", "folders"]
FORMS = {"labelled": "lines that begin with a label", "text": "plain text", "folders": "a folder for each class"}
CONLLU = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")


class _WorkingFolder(NamedTuple):
    root: str = "."
    sets: tuple[str, ...] = ()


HERE = _WorkingFolder()  # where paths of the command line begin


@dataclass(frozen=True)
class Examined:
    """A file, its format, and its first rows by column."""

    path: str
    kind: Kind
    why: str  # the format in words, with the reason
    encoding: str = "utf-8"
    format: str | None = None  # of a table
    header: bool = True
    delimiter: str = ","
    columns: dict[str, list[str]] = field(default_factory=dict)
    lists: frozenset[str] = frozenset()  # columns that hold lists of strings
    rows: int = 0
    left_out: str = ""  # files of a folder that are not read, by their kinds


def suffix_of(path: str) -> str:
    """Return the suffix of a file, without that of a packed one."""
    return Path(path.lower().removesuffix(".gz")).suffix.removeprefix(".")


def fault(path: str, message: str) -> ConfigError:
    return ConfigError([Fault(visible(path), message)])


def examine(path: str, roles: tuple[str, ...], table: bool) -> Examined:
    """Return the format and the first rows of a file or folder for a task that reads some columns.

    `table`: whether they are columns of a table where the file could be one.
    """
    if Path(path).is_dir():
        return _folders(path) if "label" in roles else _texts(path)
    if (form := FORMATS.get(suffix_of(path))) and form.reader:
        return _table(path, form)
    try:
        raw = read_bytes(path, HERE)[1]
    except ConfigError as error:
        raise ConfigError(Fault("--data", one.message) for one in error.faults) from None
    encoding = detect_encoding(raw)
    file = File(path, encoding, raw.decode(encoding, "replace").removeprefix("\ufeff"))
    lines = [line for line in file.lines() if line.strip()]
    if not lines:
        raise fault(path, "is empty")
    return replace(_by_content(path, file, lines, roles, table), encoding=encoding)


def _by_content(path: str, file: File, lines: list[str], roles: tuple[str, ...], table: bool) -> Examined:
    suffix = suffix_of(path)
    if suffix in CONLL or ("tags" in roles and suffix not in FORMATS and not lines[0].startswith("{")):
        return _conll(path, file)
    if suffix == "json" and lines[0].lstrip().startswith("["):
        raise fault(path, "is one JSON list: write one object per line (.jsonl)")
    if suffix in ("jsonl", "ndjson", "json") or (suffix not in FORMATS and _is_object(lines[0])):
        return _jsonl(path, lines)
    if suffix == "tsv":
        return _cells(path, file, "tsv", "TSV, by its name")
    if suffix == "csv":
        return _cells(path, file, "csv", "CSV, by its name")
    if not table:
        return Examined(path, "text", "plain text", columns={"text": lines[:MAX_ROWS]}, rows=len(lines))
    if _same_number(line.count("\t") for line in lines):
        return _cells(path, file, "tsv", f"TSV: {lines[0].count(chr(9))} tabs in every line")
    if "label" in roles and (labelled := _labelled(path, lines)):
        return labelled
    for delimiter, name in DELIMITERS.items():
        if _same_number(line.count(delimiter) for line in lines):
            return _cells(path, file, "csv", f"CSV: as many {name} in every line")
    return Examined(path, "text", "plain text", columns={"text": lines[:MAX_ROWS]}, rows=len(lines))


def _same_number(counts: Iterator[int]) -> bool:
    """Return whether nearly all lines have the same number of separators, and at least one."""
    times = Counter(counts)
    number, most = times.most_common(1)[0]
    return number > 0 and most >= MIN_ALIKE * times.total()


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


# -- tables -----------------------------------------------------------------------------------------------------------


def _cells(path: str, file: File, form: str, why: str) -> Examined:
    delimiter = ","
    if form == "csv":
        delimiter = _sniff(file.text)
        found = [cells for _, cells in read_csv(file.text, delimiter) if isinstance(cells, list)]
        why += f", separated by {DELIMITERS[delimiter]}" * (delimiter != ",")
    else:
        found = [line.split("\t") for line in file.lines() if line]
    width = Counter(map(len, found)).most_common(1)[0][0] if found else 0
    rows = [cells for cells in found if len(cells) == width]
    header = bool(rows) and is_header(rows[0], rows[1 : MAX_ROWS + 1])
    names = rows[0] if header else [str(i) for i in range(width)]
    rows = rows[1:] if header else rows
    if not rows:
        raise fault(path, "has a header and no rows" if header else "has no rows")
    columns = {name: [cells[i] for cells in rows[:MAX_ROWS]] for i, name in enumerate(names)}
    why += ", with a header" if header else ", without a header"
    return Examined(
        path, "table", why, format=form, header=header, delimiter=delimiter, columns=columns, rows=len(rows)
    )


def _sniff(text: str) -> str:
    """Return the delimiter that divides the most of the first rows, and the first one, into equally many columns.

    Commas come last of several: they may be decimal commas.
    """
    sample = text[:SNIFFED].rpartition("\n")[0] or text[:SNIFFED]
    shares = dict[str, float]()
    for delimiter in DELIMITERS:
        widths = [len(cells) for _, cells in read_csv(sample, delimiter) if isinstance(cells, list)]
        if widths and widths[0] > 1:
            shares[delimiter] = widths.count(widths[0]) / len(widths)
    return max(shares, key=lambda delimiter: shares[delimiter], default=",")


def is_header(first: list[str], rows: list[list[str]]) -> bool:
    """Return whether the first row of a table names its columns."""
    words = [cell.strip().lower() for cell in first]
    if not all(words) or len({*words}) < len(words) or any(map(is_number, words)):
        return False
    if {*words} & HEADER_WORDS and all(len(word) <= MAX_SHOWN for word in words):
        return True
    for i, word in enumerate(first if rows else ()):
        values = [row[i] for row in rows]
        if sum(map(is_number, values)) > 0.9 * len(values):
            return True  # a word over a column of numbers
        if word not in values and len({*values}) <= len(values) // 10:
            return True  # not one of a few values that repeat
    return False


def is_number(text: str) -> bool:
    """Return whether a cell is a number, also one with a decimal comma."""
    try:
        float(text)
    except ValueError:
        return DECIMAL_COMMA.fullmatch(text.strip()) is not None
    return True


def has_decimal_commas(values: list[str], delimiter: str) -> bool:
    """Return whether commas in numbers are decimal commas, rather than between thousands."""
    decimals = [value.strip().rpartition(",")[2] for value in values if "," in value]
    return bool(decimals) and delimiter != "," and (delimiter == ";" or any(len(digits) != 3 for digits in decimals))


def _jsonl(path: str, lines: list[str]) -> Examined:
    records = (parse_object(line) for line in lines[:MAX_ROWS])
    why = "one JSON object per line"
    return _records(path, [one for one in records if isinstance(one, dict)], "jsonl", why, len(lines))


def _table(path: str, form: TableFormat) -> Examined:
    table = open_table(Path(path), form)
    rows = itertools.islice(table.rows(table.names, into_memory=True), MAX_ROWS)
    records = [row for _, row in rows if isinstance(row, dict)]
    return _records(path, records, suffix_of(path), f"{form.title}, by its name", table.count)


def _records(path: str, records: list[dict[str, Any]], form: str, why: str, rows: int) -> Examined:
    flat = [dict(_flat(record, "")) for record in records]
    if not flat:
        raise fault(path, "has no rows")
    names = list(dict.fromkeys(name for record in flat for name in record))
    lists = frozenset(name for name in names if any(isinstance(one.get(name), list) for one in flat))
    columns = {name: [_text(record.get(name)) for record in flat] for name in names}
    return Examined(path, "table", why, format=form, columns=columns, lists=lists, rows=rows)


def _flat(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a record; nested ones have dotted names."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


# -- other formats ----------------------------------------------------------------------------------------------------


def _conll(path: str, file: File) -> Examined:
    sentences: list[list[list[str]]] = [[]]
    universal = suffix_of(path) == "conllu"
    tabs = universal or any("\t" in line.strip() for line in file.lines())
    for line in file.lines():
        if not line.strip():
            sentences.append([])
        elif not (line.startswith(("# ", "-DOCSTART-")) or (universal and line.startswith("#"))):
            sentences[-1].append(line.split("\t") if tabs else line.split())
    sentences = list(filter(None, sentences))
    if not sentences or any(len(cells) < 2 for cells in sentences[0]):
        what = "is not CoNLL: one word per line, its tag in the last column, a blank line between sentences"
        raise fault(path, what)
    count = max(len(cells) for one in sentences for cells in one)
    names = CONLLU if universal else tuple(map(str, range(count)))
    columns = {
        name: [" ".join(cells[i] for cells in one if i < len(cells)) for one in sentences[:MAX_ROWS]]
        for i, name in enumerate(names)
    }
    why = "CoNLL-U" if universal else f"CoNLL: one word per line, columns separated by {'tabs' if tabs else 'spaces'}"
    return Examined(path, "conll", why, columns=columns, rows=len(sentences))


def _labelled(path: str, lines: list[str]) -> Examined | None:
    """Return lines that begin with a label, as `1 a good film` or `__label__good a film`; None if they do not."""
    cut = [re.split(r"[ \t]+", line, maxsplit=1) for line in lines]
    labels = {cells[0] for cells in cut}
    if any(len(cells) < 2 for cells in cut) or len(labels) > max(2, min(200, len(lines) // 50)):
        return None
    columns = {"label": [cells[0] for cells in cut[:MAX_ROWS]], "text": [cells[1] for cells in cut[:MAX_ROWS]]}
    return Examined(
        path, "labelled", f"{FORMS['labelled']} ({len(labels)} different)", columns=columns, rows=len(lines)
    )


def _folders(path: str) -> Examined:
    classes = sorted(one for one in Path(path).iterdir() if one.is_dir() and not one.name.startswith("."))
    files = [
        (one.name, file)
        for one in classes
        for file in sorted(one.iterdir())
        if file.is_file() and not file.name.startswith(".")
    ]
    if not files:
        raise fault(path, "is a folder without folders of texts: each class is a folder, and each file in it a text")
    raw = [file.read_bytes() for _, file in files[:: 1 + len(files) // MAX_ROWS]]
    encoding = detect_encoding(b"\n".join(raw))
    columns = {
        "label": [name for name, _ in files[:: 1 + len(files) // MAX_ROWS]],
        "text": [one.decode(encoding, "replace") for one in raw],
    }
    why = f"{FORMS['folders']} ({len(classes)})"
    outside = [one for one in Path(path).iterdir() if one.is_file() and not one.name.startswith(".")]
    return Examined(path, "folders", why, encoding, columns=columns, rows=len(files), left_out=_by_suffix(outside))


def _texts(path: str) -> Examined:
    """Return the text files of a folder and of those below it."""
    files = files_below(Path(path))
    texts, left_out = [file for file in files if is_text_file(file)], [file for file in files if not is_text_file(file)]
    counts = _by_suffix(left_out)
    if not texts:
        what = f"{visible(path)} has no text files ({', '.join(TEXT_SUFFIXES)})"
        raise ConfigError([Fault("--data", what + (f"; left out: {counts}" if counts else ""))])
    raw = [read_bytes(str(file), HERE)[1] for file in texts]
    encoding = detect_encoding(b"\n".join(raw))
    found = [one.decode(encoding, "replace") for one in raw]
    why = f"{len(texts)} text files in {path} and folders below"
    rows = sum(text.count("\n") + 1 for text in found)
    return Examined(path, "texts", why, encoding, columns={"text": found}, rows=rows, left_out=counts)


def _by_suffix(files: list[Path]) -> str:
    """Return how many files of each kind there are, in words."""
    counts = Counter(file.suffix.lower() or "without a suffix" for file in files)
    return ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common())


# -- encodings --------------------------------------------------------------------------------------------------------


SAMPLE = 2**20  # bytes that are compared with each encoding
MAX_DAMAGE = 0.02  # share of characters that are not UTF-8 in a file that is called UTF-8


def _is_hangul(c: str) -> bool:
    return "가" <= c <= "힣" or "ㄱ" <= c <= "ㆎ" or "\u3000" <= c <= "\u303f" or "\u2000" <= c <= "\u2fff"


def _is_kana(c: str) -> bool:
    return "\u3040" <= c <= "\u30ff"


def _is_common_han(c: str) -> bool:
    """Return whether a character is among the 3,755 of level 1 of GB 2312, or a full-width sign."""
    code = c.encode("gb2312", "ignore")
    return (len(code) == 2 and 0xB0 <= code[0] <= 0xD7) or "\u3000" <= c <= "\u303f" or "\uff00" <= c <= "\uffef"


def _is_common_big5(c: str) -> bool:
    code = c.encode("big5", "ignore")
    return len(code) == 2 and 0xA1 <= code[0] <= 0xC6


# Encodings in the order in which they are tried, with the characters that text in them consists of, and their least
# share. Korean bytes are also valid Chinese ones and the reverse: only the characters differ.
CANDIDATES: tuple[tuple[str, Callable[[str], bool], float], ...] = (
    ("cp949", _is_hangul, 0.85),
    ("cp932", _is_kana, 0.25),
    ("euc_jp", _is_kana, 0.25),
    ("gb18030", _is_common_han, 0.85),
    ("big5", _is_common_big5, 0.9),
)


def detect_encoding(raw: bytes) -> str:
    """Return the name of the encoding that some bytes are text in."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    text = raw.decode("utf-8", "replace")
    foreign = sum(not c.isascii() for c in text)
    if text.count("\ufffd") <= MAX_DAMAGE * foreign:
        return "utf-8"
    sample = raw[:SAMPLE].rpartition(b"\n")[0] or raw[:SAMPLE]
    for name, is_usual, least in CANDIDATES:
        try:
            found = [c for c in sample.decode(name) if not c.isascii()]
        except UnicodeDecodeError:
            continue
        if found and sum(map(is_usual, found)) >= least * len(found):
            return name
    try:
        raw.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252" if any(0x80 <= byte < 0xA0 for byte in raw) else "latin-1"
