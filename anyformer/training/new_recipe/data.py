"""Sources of a recipe for some files: which file is which split, and how one file is split. Imports no torch."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from anyformer.config.spec import ConfigError, Fault, did_you_mean
from anyformer.data.readers import Rows, read
from anyformer.data.synthetic import Split
from anyformer.recipe import (
    FORMATS,
    ClassFolders,
    ColumnName,
    ConllFile,
    Data,
    JoinedSources,
    MatchedLines,
    ParallelFiles,
    SingleSource,
    Source,
    TableFile,
    TextFile,
)
from anyformer.training.new_recipe.columns import Chosen, Role, choose_columns
from anyformer.training.new_recipe.examine import CONLLU, Examined, examine, has_decimal_commas, suffix_of

SPLITS: dict[Split, frozenset[str]] = {
    "valid": frozenset(("valid", "validation", "dev", "val")),
    "test": frozenset(("test", "eval")),
    "train": frozenset(("train", "training")),
}
MIN_ROWS = 20  # fewer rows are not split
MIN_ROWS_FOR_TEST = 200
HELD_OUT = {"seq2seq": 300, "lm": 0}  # rows for validation, and as many for the test
USUAL_HELD_OUT = 1000
LABELLED = r"(?P<label>\S+)[ \t]+(?P<text>.*)"
MAX_BAD_ROWS = 0.05  # share of rows that cannot be read and are skipped; more of them are an error
# columns of formats that are not tables
READ_AS = {
    "folders": ("text", "label"),
    "labelled": ("text", "label"),
    "conll": ("words", "tags", "text"),
    "text": ("text",),
    "texts": ("text",),
}
ICONV = {"latin-1": "latin1", "euc_jp": "euc-jp"}  # names of encodings that differ from Python's
MIN_TEXT = 2000  # characters of a text that is split


@dataclass(frozen=True)
class Sources:
    """The sources of a recipe, the rows of each, and the reasons."""

    train: Source
    valid: Source | None
    test: Source | None
    rows: dict[Split, Rows]
    examined: Examined
    reasons: list[tuple[str, str, str]]  # what, the choice, why

    @property
    def skips(self) -> str:
        """Why bad rows are skipped; empty if there are none."""
        return next((f"{choice}: {why}" for what, choice, why in self.reasons if what == "bad rows"), "")


def find_sources(paths: Sequence[str], task: str, roles: tuple[Role, ...], given: dict[Role, str]) -> Sources:
    """Return the sources of a task for some files, with all rows read once."""
    named = _by_name(paths)
    numeric, reasons = task == "regress", list[tuple[str, str, str]]()
    found: dict[Split, SingleSource | JoinedSources] = {}
    first: Examined | None = None
    for split, files in named.items():
        if task == "seq2seq" and len(files) == 2 and not any(suffix_of(file) in FORMATS for file in files):
            parts: list[tuple[Examined, SingleSource]] = [_parallel(files, given)]
        else:
            parts = [_single(file, task, roles, given, numeric, reasons if first is None else []) for file in files]
        one = parts[0][0]
        found[split] = parts[0][1] if len(parts) == 1 else JoinedSources(parts=tuple(part for _, part in parts))
        if first is None:
            first = one
            lines = "lines" if one.kind in ("text", "texts") else "rows"
            reasons[:0] = [("format", one.why, f"{one.encoding}, {one.rows:,} {lines}")]
        if left_out := ", ".join(part.left_out for part, _ in parts if part.left_out):
            why = "files outside the folders of the classes" if one.kind == "folders" else "files that are no texts"
            reasons.append(("left out", left_out, why))
    assert first is not None
    if len(named) > 1:
        reasons += [(split, ", ".join(files), "by its name") for split, files in named.items()]
    else:
        found = _split(found["train"], first, task, reasons)
    return _read(found, first, reasons)


def _by_name(paths: Sequence[str]) -> dict[Split, list[str]]:
    """Return the files of each split: by words in their names, if one of them is for validation or test."""
    found: dict[Split, list[str]] = {"train": []}
    for path in paths:
        parts = {*re.split(r"[^a-z]+", Path(path).name.lower())}
        split: Split = next((name for name, words in SPLITS.items() if parts & words), "train")
        found.setdefault(split, []).append(path)
    if not found["train"]:
        raise ConfigError([Fault("--data", f"{paths[0]}: there is no file to train on beside it")])
    return found


def _parallel(files: list[str], given: dict[Role, str]) -> tuple[Examined, ParallelFiles]:
    source, target = (examine(file, ("text",), table=False) for file in files)
    _refuse_columns(given, f"{files[0]} and {files[1]} are two files with one row per line")
    if source.encoding != target.encoding:
        what = f"{source.path} is {source.encoding} and {target.path} {target.encoding}: convert to UTF-8 with"
        commands = [_iconv(one) for one in (source, target) if one.encoding != "utf-8"]
        raise ConfigError([Fault("--data", f"{what} `{' && '.join(commands)}`")])
    columns = {"source": source.columns["text"], "target": target.columns["text"]}
    why = "two files, one row per line: source and target"
    both = Examined(source.path, "text", why, source.encoding, columns=columns, rows=source.rows)
    return both, ParallelFiles(source=files[0], target=files[1], encoding=source.encoding)


def _iconv(one: Examined) -> str:
    """Return the command that converts a text file to UTF-8, in a file of another name."""
    path = Path(one.path)
    made = shlex.quote(str(path.with_name(f"utf8-{path.name.removesuffix('.gz')}")))
    name, convert = shlex.quote(one.path), f"iconv -f {ICONV.get(one.encoding, one.encoding)} -t utf-8"
    return f"gunzip -c {name} | {convert} > {made}" if path.suffix == ".gz" else f"{convert} {name} > {made}"


def _single(
    path: str,
    task: str,
    roles: tuple[Role, ...],
    given: dict[Role, str],
    numeric: bool,
    reasons: list[tuple[str, str, str]],
) -> tuple[Examined, SingleSource]:
    one = examine(path, roles, table=roles != ("text",) or bool(given))
    if one.kind in READ_AS and not {*roles} <= {*READ_AS[one.kind]}:
        needs = " and ".join(f"`{role}`" for role in roles)
        what = f"is {one.why}: the task needs {needs}, as columns of a table"
        if task == "seq2seq":
            what += ", or two files: --data SOURCE TARGET"
        raise ConfigError([Fault(path, what)])
    if one.kind in READ_AS and not (one.kind == "conll" and task == "tag"):
        _refuse_columns(given, f"{path} is {one.why}")
    match one.kind:
        case "folders":
            return one, ClassFolders(path=path, encoding=one.encoding)
        case "conll":
            return _conll(one, given)
        case "labelled":
            return one, MatchedLines(path=path, pattern=LABELLED, encoding=one.encoding)
        case "text" | "texts":
            return one, TextFile(path=path, encoding=one.encoding, document="line" if task == "mlm" else "file")
    chosen = choose_columns(one, roles, given, numeric=numeric)
    reasons += [(role, f"column '{column.name}'", column.why) for role, column in _in_order(chosen, roles)]
    if ignored := [name for name in one.columns if name not in {column.name for column in chosen.values()}]:
        reasons.append(("ignored", ", ".join(f"'{name}'" for name in ignored), "columns that the task does not read"))
    form = None if suffix_of(path) == one.format else one.format
    columns: Any = {role: column.name for role, column in chosen.items()}
    if numeric and has_decimal_commas(one.columns[columns["label"]], "\t" if one.format == "tsv" else one.delimiter):
        columns["decimal"] = ","
    settings: Any = {"format": form, "header": one.header, "delimiter": one.delimiter, "encoding": one.encoding}
    source = TableFile(path=path, **settings, **columns)
    picked: dict[str, list[str]] = {role: one.columns[column.name] for role, column in _in_order(chosen, roles)}
    return Examined(path, "table", one.why, one.encoding, columns=picked, rows=one.rows), source


def _refuse_columns(given: dict[Role, str], what: str) -> None:
    if given:
        raise ConfigError(Fault(f"--{role}", f"= {name!r}: {what}: it has no columns") for role, name in given.items())


def _conll(one: Examined, given: dict[Role, str]) -> tuple[Examined, ConllFile]:
    """Return the words and tags of a CoNLL file; their columns have numbers, and in CoNLL-U names as well."""
    names, faults, columns = list(one.columns), list[Fault](), dict[str, int]()
    for role, name in given.items():
        if name.upper() in names or (name.isdecimal() and int(name) < len(names)):
            columns[role] = names.index(name.upper()) if name.upper() in names else int(name)
        else:
            faults.append(Fault(f"--{role}", f"= {name!r}: no such column in {one.path}; {did_you_mean(name, names)}"))
    word, tag = (1, 3) if names[0] == CONLLU[0] else (0, len(names) - 1)
    word, tag = columns.get("words", word), columns.get("tags", tag)
    if word == tag:
        role = "tags" if "tags" in columns else "words"
        faults.append(
            Fault(f"--{role}", f"= {given[role]!r}: is also the column of the {'words' if role == 'tags' else 'tags'}")
        )
    if faults:
        raise ConfigError(faults)
    read = {"words": one.columns[names[word]], "tags": one.columns[names[tag]]}
    source = ConllFile(path=one.path, encoding=one.encoding, word=columns.get("words"), tag=columns.get("tags"))
    return replace(one, columns=read), source


def _in_order(chosen: dict[Role, Chosen], roles: tuple[Role, ...]) -> list[tuple[Role, Chosen]]:
    known = [role for role in get_args(Role) if role in chosen]
    return [(role, chosen[role]) for role in known if role in roles or role == "pair"]


def _split(
    source: SingleSource | JoinedSources, one: Examined, task: str, reasons: list[tuple[str, str, str]]
) -> dict[Split, Any]:
    """Return the parts of the only source, by a hash of the text where the format allows it."""
    characters = sum(map(len, one.columns.get("text", [])))
    if isinstance(source, TextFile) and source.document == "file":
        share, test = 0.05 if characters > 10 * MIN_TEXT else 0.1, characters > 10 * MIN_TEXT
        few, why = characters < MIN_TEXT, "the end of the text"
    else:
        share = min(0.1, max(0.01, HELD_OUT.get(task, USUAL_HELD_OUT) / one.rows))
        few = one.rows < MIN_ROWS or max(len({*column}) for column in one.columns.values()) < MIN_ROWS
        test = one.rows >= MIN_ROWS_FOR_TEST
        share, why = round(share if test else 0.2, 2), "spread over the file"
    if few:
        reasons.append(("split", "all rows are for training", "different rows are too few to hold some back"))
        return {"train": source}
    group = _group(source)
    if group:
        why = "by a hash of the text, so that equal texts are in one part"
    ends: dict[Split, float] = {
        "train": 1 - share * (1 + test),
        "valid": 1 - share * test,
        **({"test": 1.0} if test else {}),
    }
    found: dict[Split, Any] = {}
    for start, (split, stop) in zip((0.0, *ends.values()), ends.items(), strict=False):
        limits = {"start": round(start, 2), "stop": round(stop, 2), **({"group": group} if group else {})}
        if isinstance(source, JoinedSources):
            found[split] = JoinedSources(parts=tuple(part.model_copy(update=limits) for part in source.parts))
        else:
            found[split] = source.model_copy(update=limits)
    listed = " / ".join(f"{split} {1 - share * (1 + test) if split == 'train' else share:.0%}" for split in found)
    reasons.append(("split", listed, why))
    return found


def _group(source: SingleSource | JoinedSources) -> ColumnName | None:
    """Return the column whose hash decides the part of a row."""
    match source:
        case ParallelFiles():
            return "source"
        case JoinedSources():
            return _group(source.parts[0])
        case MatchedLines():
            return "text"
        case TableFile():
            column = source.text if source.source is None else source.source
            return None if isinstance(column, tuple) else column
        case _:
            return None


def _read(found: dict[Split, Any], one: Examined, reasons: list[tuple[str, str, str]]) -> Sources:
    """Read all rows; a part that chance left empty is dropped."""
    rows: dict[Split, Rows] = {}
    for split, source in found.items():
        try:
            rows[split] = read(source, Data(train=source, root=".", on_bad_row="skip"), split, 0)
        except ConfigError as error:
            if split == "train" or not all(fault.path.endswith("group") for fault in error.faults):
                raise
        if split != "train" and not len(rows.get(split, ())):
            reasons.append((split, "none", "no row fell into this part"))
            rows.pop(split, None)
    if not len(rows["train"]):
        unread = rows["train"].bad
        what = f"no row can be read: {unread[0]}" if unread else "has no rows"
        raise ConfigError([Fault(one.path, what)])
    bad = [row for split in rows.values() for row in split.bad]
    if 0 < len(bad) <= MAX_BAD_ROWS * sum(map(len, rows.values())):
        reasons.append(("bad rows", f"{len(bad):,} skipped", str(bad[0])))
    valid, test = (found[split] if split in rows else None for split in ("valid", "test"))
    return Sources(found["train"], valid, test, rows, one, reasons)
