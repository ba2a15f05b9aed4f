"""Rows of a source, with the bad ones reported together. Imports no torch.

A row that cannot be read becomes a `BadRow` with its file and line; reading continues, so that all are reported
together. Lines end at "\n" or "\r\n" only: U+2028, form feeds and the like are part of a text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from anyformer.config.spec import ConfigError, Fault, faults_under
from anyformer.data.files import File, Parsed, max_bytes, require_sets
from anyformer.recipe.data import Data, SeveralSources
from anyformer.recipe.source import CONVERSATIONS, Root, RowFile, Source, Split

if TYPE_CHECKING:
    from anyformer.data.shards import Corpus

MAX_BAD_ROWS_SHOWN = 5  # in an error message
GOLDEN = 2_654_435_769  # 2^32 ÷ golden ratio
LISTS = ("words", "tags")  # columns that may be lists of strings
T = TypeVar("T")
Encode = Callable[[list[str]], list[T]]  # texts → ids


class BadRow(NamedTuple):
    """A row that cannot be read, and why."""

    file: str
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.why}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows by column: `source` and `target`, or `text` and others; the i-th entries of all columns are one row."""

    columns: dict[str, list[str]] = field(repr=False)
    file: str
    lines: Sequence[int] = field(repr=False)  # line in which each row begins
    bad: tuple[BadRow, ...] = field(default=(), repr=False)  # rows that were left out
    files: Sequence[str] | None = field(default=None, repr=False)  # file of each row, if there are several
    cut: int = 0  # rows of which a task reads the beginning only
    stream: "Corpus | None" = None  # tokenised text of shards; then there are no columns
    ids: Mapping[str, list[Any]] = field(default_factory=dict, repr=False, compare=False)  # columns already encoded

    @classmethod
    def made(cls, name: str, columns: dict[str, list[str]]) -> "Rows":
        """Return rows that are numbered from 1, as those of no file are."""
        return cls(columns, name, range(1, len(next(iter(columns.values()))) + 1))

    def __len__(self) -> int:
        return len(self.lines)

    def origin(self, i: int) -> str:
        """Return where the i-th row begins, as file:line."""
        return f"{self.file_of(i)}:{self.lines[i]}"

    def file_of(self, i: int) -> str:
        """Return the file of the i-th row."""
        return self.file if self.files is None else self.files[i]

    def with_ids(self, encode: Mapping[str, Encode[Any]]) -> "Rows":
        """Return the rows with the ids of some columns. Pass them on only to the task that has encoded them."""
        return replace(self, ids={role: one(self.columns[role]) for role, one in encode.items()})

    def encoded(self, role: str, encode: Encode[T]) -> list[T]:
        """Return the ids of a column: those stored by `with_ids`, or else new ones."""
        return self.ids[role] if role in self.ids else encode(self.columns[role])

    def take(self, numbers: Sequence[int]) -> "Rows":
        """Return the rows with these numbers, without the bad rows."""
        columns = {role: [values[i] for i in numbers] for role, values in self.columns.items()}
        files = None if self.files is None else [self.files[i] for i in numbers]
        ids = {role: [values[i] for i in numbers] for role, values in self.ids.items()}
        return Rows(columns, self.file, [self.lines[i] for i in numbers], (), files, ids=ids)

    def without(self, bad: Mapping[int, str]) -> "Rows":
        """Return the rows except some that are bad; each number comes with the reason."""
        if not bad:
            return self
        more = (BadRow(self.file_of(i), self.lines[i], why) for i, why in bad.items())
        return replace(self.take([i for i in range(len(self)) if i not in bad]), bad=(*self.bad, *more))


def read(source: Source, data: Data, split: Split, seed: int, key: str | None = None, by: str | None = None) -> Rows:
    """Return the rows of a source. Only synthetic training rows depend on the seed.

    `key` is that of the source in the recipe, if it is not that of the split. `by` is a column of the file that the
    rows have as the column "by".
    """
    require_sets(data)
    key = key or f"data.{split}"
    try:
        rows = _read(source, data, split, seed, by)
    except ConfigError as error:
        is_by = [fault.path.rpartition(".")[2] == "by" for fault in error.faults]  # no key of the recipe
        raise ConfigError(
            Fault("by", fault.message) if own else fault.under(key)
            for fault, own in zip(error.faults, is_by, strict=True)
        ) from None
    return check_bad_rows(rows, data, key)


def _read(source: Source, data: Root, split: Split, seed: int, by: str | None) -> Rows:
    if by is not None and not source.names_columns:
        what = f"only a table or lines with a pattern have columns, not {source.kind}"
        raise ConfigError([Fault("by", f"= {by!r}: {what}")])
    return source.read(data, split, seed, by)


def check_bad_rows(rows: Rows, data: Data, path: str) -> Rows:
    """Return the rows. Raise a `ConfigError` if some are bad and `data.on_bad_row` is "error", or if none is good."""
    if rows.bad and data.on_bad_row == "error":
        raise ConfigError(_bad_row_faults(rows, path))
    if not len(rows):
        why = f"; all {len(rows.bad)} are bad, the first: {rows.bad[0]}" if rows.bad else ""
        raise ConfigError([Fault(path, f"no rows in {rows.file}{why}")])
    return rows


def common_inputs(rows: Rows, others: Rows, columns: Iterable[str]) -> int:
    """Return how many rows have the inputs of another row: all columns but targets, labels and tags; 0 for shards."""
    answers = ("target", "rejected", "label", "tags", "answers")
    names = [name for name in (*columns, *CONVERSATIONS) if name not in answers and name in rows.columns]
    if not names or not others.columns.keys() >= {*names}:
        return 0
    inputs, known = (zip(*(some.columns[name] for name in names), strict=True) for some in (rows, others))
    return sum(map(set(known).__contains__, inputs))


def _bad_row_faults(rows: Rows, path: str) -> Iterator[Fault]:
    count = len(rows.bad)
    counts = f"{count} bad row{'s' if count > 1 else ''} and {len(rows)} good"
    yield Fault(path, f'{counts}: fix them, or set data.on_bad_row = "skip"')
    yield from (Fault("", str(bad)) for bad in rows.bad[:MAX_BAD_ROWS_SHOWN])
    if count > MAX_BAD_ROWS_SHOWN:
        yield Fault("", f"... and {count - MAX_BAD_ROWS_SHOWN} more")


# -- rows -------------------------------------------------------------------------------------------------------------


def labelled(rows: Rows, label: str | None) -> Rows:
    """Return the rows with a label for all of them, if there is one."""
    return rows if label is None else replace(rows, columns={**rows.columns, "label": [label] * len(rows)})


def collect(parsed: Parsed, files: dict[str, File]) -> Rows:
    """Return the rows of a source; `files` has the file of each column."""
    columns: dict[str, list[str]] = {role: [] for role in files}
    lines, bad = list[int](), list[BadRow]()
    first = next(iter(files.values()))
    characters, limit = 0, max_bytes()
    for line, row in parsed:
        if isinstance(row, str):
            bad.append(BadRow(first.name, line, row))
            continue
        for role, file in files.items():
            # a row may have no label, and a word may be a space
            is_blank = not row[role].strip("\n" if role in LISTS else None) and role not in ("label", "by")
            if why := file.flaw(row[role]) or (
                f"the {role} {'are' if role in LISTS else 'is'} empty" if is_blank else ""
            ):
                bad.append(BadRow(file.name, line, why))
                break
        else:
            lines.append(line)
            for role, values in columns.items():
                values.append(row[role])
                characters += len(row[role])
            if characters > limit:
                what = f"the rows have more than {limit / 2**20:,.0f} MiB of text, the limit for this machine's memory"
                raise ConfigError([Fault("", f"{first.name}:{line}: {what}")])
    return Rows(columns, first.name, lines, tuple(bad))


def joined_rows(source: SeveralSources, data: Root, split: Split, seed: int, by: str | None) -> Rows:
    """Return the rows of the sources within a source; of a mixture, each has the name of its task in "task"."""
    found = list[Rows]()
    for path, name, one in source.inner():
        with faults_under(path):
            found.append(_read(one, data, split, seed, by))
        if source.of_mixture:
            found[-1].columns["task"] = [name] * len(found[-1])
    return concatenate(found)


def concatenate(parts: Sequence[Rows], file: str | None = None) -> Rows:
    """Return the rows of several sources, with the columns that all of them have."""
    file = file or ", ".join(dict.fromkeys(part.file for part in parts))
    roles = [role for role in parts[0].columns if all(role in part.columns for part in parts)]
    columns = {role: [value for part in parts for value in part.columns[role]] for role in roles}
    lines = [line for part in parts for line in part.lines]
    bad = tuple(row for part in parts for row in part.bad)
    return Rows(columns, file, lines, bad, [part.file_of(i) for part in parts for i in range(len(part))])


def part_of(source: RowFile, parsed: Iterable[T]) -> Iterator[T]:
    """Return the rows of the part from `start` to `stop`, contiguous ones for the split "rows".

    Else they are spread: row n is in the part if frac(n · φ) is, φ the golden ratio. Multiples of φ fill the unit
    interval evenly, from any row on and at any stride. So each part of a sorted or periodic file is representative, and
    a row remains in its part when others are appended.
    """
    if source.split == "rows":
        rows = list(parsed)
        return iter(rows[int(len(rows) * source.start) : int(len(rows) * source.stop)])
    return (row for n, row in enumerate(parsed) if _is_in_part(source, n * GOLDEN % 2**32))


def _is_in_part(source: RowFile, key: int) -> bool:
    """Return whether a 32-bit number, as a fraction, lies from `start` to `stop`."""
    return int(source.start * 2**32) <= key < int(source.stop * 2**32)


def selected(source: RowFile, parsed: Parsed, group: str | None) -> Parsed:
    """Yield the rows of the part from `start` to `stop`; of those with equal values in the column `group`, all or none.

    Unreadable rows, which have no value, are spread.
    """
    if group is None:
        yield from part_of(source, parsed)
        return
    values, empty = set[str](), True
    for n, (line, row) in enumerate(parsed):
        if isinstance(row, str):
            key = n * GOLDEN % 2**32
        else:
            values.add(row[group])
            key = int.from_bytes(blake2b(row[group].encode("utf-8", "surrogatepass"), digest_size=4).digest())
        if _is_in_part(source, key):
            empty = False
            yield line, row
    if empty and values:
        count = f"{len(values)} value{'s' * (len(values) > 1)}"
        what = f"has {count}, and none is in the part from {source.start:g} to {source.stop:g}"
        raise ConfigError([Fault("group", f"= {source.group!r}: {what}: use a larger part, or other columns")])
