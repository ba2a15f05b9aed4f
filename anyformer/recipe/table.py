"""Tables as a source: their columns, and the formats that they may have. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from anyformer.config import Fault, MediaKind
from anyformer.config.spec import Flag, Fraction, Probability, shorten
from anyformer.recipe.source import ANSWERED, ANSWERING, EPISODES, Encoding, Root, RowFile, RowSplit, Split

if TYPE_CHECKING:
    from anyformer.data.readers import Rows

MAX_PATH_SHOWN = 100  # characters of a path in an error message
MEDIA_ROLES = ("source", "text", "pair")  # columns that may refer to images and sounds
ROLES = ("source", "target", "rejected", "text", "pair", "label", "words", "tags", "messages", "group")
ColumnName = str | Annotated[int, Field(strict=True, ge=0, lt=2**31)]  # the name of a column, or its number from 0
ColumnNames = ColumnName | Annotated[tuple[ColumnName, ...], Field(min_length=1)]  # several are joined to one text
Delimiter = Annotated[str, Field(pattern=r'^[^"\r\n]$')]


class TableFormat(NamedTuple):
    """A format of tables. A new one is a row of `FORMATS`, a word of `TableFile.format`, and its reader."""

    title: str  # in messages
    is_records: bool = False  # rows are records, whose fields have names
    reader: str = ""  # the module of `anyformer.data` whose `OpenTable` reads a file that is no text


FORMATS = {
    "tsv": TableFormat("TSV"),
    "csv": TableFormat("CSV"),
    "jsonl": TableFormat("lines of JSON", is_records=True),
    "parquet": TableFormat("Parquet", is_records=True, reader="parquet"),
}


def format_of(name: str) -> str | None:
    """Return the format of a table by the suffix of its file; None if it is not one of `FORMATS`."""
    suffix = name.lower().removesuffix(".gz").rpartition(".")[2]
    return suffix if suffix in FORMATS else None


class TableFile(RowFile):
    """Columns of a .tsv, .csv, .jsonl or .parquet file, by name or by number: `text = 2` is the third column.

    `header = false` is for files without a header, and for JSON lists. A column of JSON or Parquet may be nested:
    `meta.title`, `translations.0.text`. A list of columns is joined to one text: `text = ["title", "body"]`.
    """

    kind: Literal["table"] = "table"
    path: str  # the file
    source: ColumnNames | None = None  # column of the source (tasks with pairs of source and target), or a list of them
    target: ColumnNames | None = None  # column of the target, or a list of columns
    rejected: ColumnNames | None = (
        None  # column of the answer that is worse than the target (dpo), or a list of columns
    )
    text: ColumnNames | None = None  # column of the text, or a list of columns
    pair: ColumnNames | None = None  # column of the second text of a pair, or a list of columns
    label: ColumnName | None = None  # column of the label
    words: ColumnName | None = None  # column of a sentence's words: a list, or a string separated by spaces
    tags: ColumnName | None = None  # column of the words' tags, in the same form
    # column of conversations, or a list of columns: a message of the user, one of the assistant, and so on. For dpo and
    # grpo it is the prompt, in the place of `source`, and answers may be lists of messages. In dpo both answers may
    # begin with the prompt, if neither `messages` nor `source` is set
    messages: ColumnNames | None = None
    join: str = " "  # text between joined columns; blank cells are left out
    images: ColumnNames | None = None  # which of these columns hold paths of images, relative to the table's folder
    sounds: ColumnNames | None = None  # which of these columns hold paths of sounds; a.wav+b.wav are joined to one
    format: Literal["tsv", "csv", "jsonl", "parquet"] | None = None  # the format; None: by the suffix
    header: Flag = True  # the first row names the columns
    delimiter: Delimiter = ","  # between the columns of a CSV; cells in quotes may hold it
    decimal: Literal[".", ","] = "."  # sign before the decimals of numbers, in labels of the task regress
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    group: ColumnName | None = None  # column whose equal values are in one part
    names_columns = True

    def columns(self) -> dict[str, ColumnNames]:
        """Return the columns that are named, by what they are read as."""
        return {role: name for role in ROLES if (name := getattr(self, role)) is not None}

    @property
    def holds_answers(self) -> bool:
        """True if rows are conversations and answers to them, which may be lists of messages (dpo, grpo)."""
        return self.source is None and (self.rejected if self.messages is None else self.target) is not None

    @property
    def form(self) -> str | None:
        """The format, as given or by the suffix; None if that is not one of `FORMATS`."""
        return self.format or format_of(self.path)

    def media(self) -> dict[ColumnName, MediaKind]:
        """Return the columns that hold paths of images or sounds, with their kind."""
        both: tuple[tuple[MediaKind, ColumnNames | None], ...] = (("image", self.images), ("audio", self.sounds))
        listed = ((kind, names if isinstance(names, tuple) else (names,)) for kind, names in both if names is not None)
        return {name: kind for kind, several in listed for name in several}

    def unknown_format(self) -> Fault:
        """Return the fault of a suffix that is not one of `FORMATS`."""
        name = shorten(self.path, MAX_PATH_SHOWN)
        *first, last = map(repr, FORMATS)
        return Fault("format", f"is not clear from the name {name!r}: set it to {', '.join(first)} or {last}")

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.tables import table_rows

        return table_rows(self, data, by)

    def fingerprints(self, data: Root) -> Iterator[tuple[str, str]]:
        from anyformer.data.tables import media_fingerprints

        return media_fingerprints(self, data)

    def fits(self, columns: tuple[str, ...]) -> bool:
        return columns not in (EPISODES, ANSWERED)

    def required(self, task: str, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the columns that a task must have: a conversation can be in the place of a source."""
        answers = task in ANSWERING and self.holds_answers
        return tuple(name for name in columns if name != "source") if answers else columns

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        yield from super().faults(task, columns)
        if self.form is None:
            yield self.unknown_format()
            readable = self.model_copy(update={"format": next(iter(FORMATS))})
            yield from readable.faults(task, columns)  # report the other faults, too
        elif self.source is not None and self.messages is not None and task in ANSWERING:
            yield Fault("messages", f"= {self.messages!r}: is the prompt, as `source` is: leave out one of them")
        elif any(getattr(self, name) is None for name in self.required(task, columns)):
            if len(columns) == 1:
                yield Fault(columns[0], f"is required: the column that the task {task} reads")
            else:
                *first, last = (f"`{name}`" for name in columns)
                yield Fault("", f"the task {task} needs the columns {', '.join(first)} and {last}")
        else:
            yield from self._setting_faults(task, columns)

    def _setting_faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        """Yield settings that do not fit the format, the task, or the columns."""
        named = self.columns()
        if self.delimiter != "," and self.form != "csv":
            yield Fault("delimiter", f"= {self.delimiter!r}: is for CSV, and this is {self.form}")
        if self.decimal == "," and task != "regress":
            yield Fault("decimal", f"= ',': is for numbers, which the task regress reads, and not {task}")
        if self.join != " " and not any(
            isinstance(names, tuple) for role, names in named.items() if role != "messages"
        ):
            yield Fault("join", f"= {self.join!r}: is for a list of columns, such as text = ['title', 'body']")
        read = single_columns({role: names for role, names in named.items() if role in MEDIA_ROLES}).values()
        paths = {key: names for key in ("images", "sounds") if (names := getattr(self, key)) is not None}
        for key, name in single_columns(paths).items():
            if name not in read:
                yield Fault(key, f"= {name!r}: no column of this name is read: name it in `text` or `source`, too")
        form = FORMATS[self.form or "csv"]
        if form.is_records and (self.header or form.reader):
            what = f"columns of {form.title} have names: give them"
            what = what if form.reader else f"{form.title} have names: give them, or set header = false for JSON lists"
            numbers = {key: name for key, name in single_columns(named).items() if isinstance(name, int)}
            yield from (Fault(key, f"= {number}: {what}") for key, number in numbers.items())
        if self.pair is not None and "pair" not in columns and "label" in columns:
            yield Fault("pair", f"= {self.pair!r}: set task.pairs = true, or leave it out: the task reads single texts")


def single_columns(columns: dict[str, ColumnNames]) -> dict[str, ColumnName]:
    """Return each column by its key in the source; those of a list have keys such as `text.0`."""
    single: dict[str, ColumnName] = {}
    for role, names in columns.items():
        single |= {f"{role}.{i}": name for i, name in enumerate(names)} if isinstance(names, tuple) else {role: names}
    return single
