"""Sources of examples: files, shards and synthetic tasks, and which sources fit which task. Imports no torch."""

import re
import warnings
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Fault, Spec
from anyformer.config.spec import BY_KIND, Flag, Fraction, Probability, Size, did_you_mean, shorten

TABLE_FORMATS = ("tsv", "csv", "jsonl", "parquet")
MAX_PATH_SHOWN = 100  # characters of a path in an error message
Encoding = str  # a Python codec: utf-8, latin-1, cp949, ...
Column = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
ColumnName = str | Annotated[int, Field(strict=True, ge=0, lt=2**31)]  # the name of a column, or its number from 0
ColumnNames = ColumnName | Annotated[tuple[ColumnName, ...], Field(min_length=1)]  # several are joined to one text
Label = Annotated[str, Field(min_length=1)]
Length = Annotated[int, Field(strict=True, ge=1, le=10_000)]
RowSplit = Literal["spread", "rows"]


class TextFile(Spec):
    """Plain text for a language model.

    `start` and `stop` select a part of it, as fractions of its characters. With `document = "line"`, a line belongs to
    the part in which it begins. With a `label`, all its texts have that label: one file per class.
    """

    kind: Literal["text"] = "text"
    path: str  # the file
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    document: Literal["file", "line"] = "file"  # whether one document is a file or a line
    label: Label | None = None  # label of all texts
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction


class ParallelFiles(Spec):
    """Two files with one row per line, source and target.

    Here and below, `start` and `stop` select a fraction of the rows: spread evenly over the file, or with
    `split = "rows"` contiguous ones. With `group`, a hash of that column decides: rows with equal values are in one
    part, and the fractions are those of the values.
    """

    kind: Literal["parallel"] = "parallel"
    source: str  # file of the sources
    target: str  # file of the targets, with as many lines
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    group: Literal["source", "target"] | None = None  # rows with equal values here are in one part


class TableFile(Spec):
    """Columns of a .tsv, .csv, .jsonl or .parquet file, by name or by number: `text = 2` is the third column.

    `header = false` is for files without a header, and for JSON lists. A column of JSON or Parquet may be nested:
    `meta.title`, `translations.0.text`. A list of columns is joined to one text: `text = ["title", "body"]`.
    """

    kind: Literal["table"] = "table"
    path: str  # the file
    source: ColumnNames | None = None  # column of the source (tasks with pairs of source and target), or a list of them
    target: ColumnNames | None = None  # column of the target, or a list of columns
    text: ColumnNames | None = None  # column of the text, or a list of columns
    pair: ColumnNames | None = None  # column of the second text of a pair, or a list of columns
    label: ColumnName | None = None  # column of the label
    words: ColumnName | None = None  # column of a sentence's words: a list, or a string separated by spaces
    tags: ColumnName | None = None  # column of the words' tags, in the same form
    join: str = " "  # text between joined columns; blank cells are left out
    format: Literal["tsv", "csv", "jsonl", "parquet"] | None = None  # the format; None: by the suffix
    header: Flag = True  # the first row names the columns
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    group: ColumnName | None = None  # column whose equal values are in one part


def table_format(source: TableFile) -> str | None:
    """Return the format of a table, as given or by its suffix; None if the suffix is not one of `TABLE_FORMATS`."""
    if source.format is not None:
        return source.format
    suffix = source.path.lower().removesuffix(".gz").rpartition(".")[2]
    return suffix if suffix in TABLE_FORMATS else None


def unknown_format(source: TableFile) -> Fault:
    """Return the fault of a table whose suffix is not one of `TABLE_FORMATS`."""
    name = shorten(source.path, MAX_PATH_SHOWN)
    return Fault("format", f"is not clear from the name {name!r}: set it to 'tsv', 'csv', 'jsonl' or 'parquet'")


class ConllFile(Spec):
    """One word per line, with its tags in columns; a blank line ends a sentence.

    CoNLL-U has tabs between columns and comments that begin with #; multiword ranges (1-2) and empty nodes (1.1) are
    skipped. In other files with tabs, a line that begins with "# " and has no tab is a comment. Files with spaces have
    no comments unless `comment` is set, because such a line could be a word. Lines of -DOCSTART- are skipped. In files
    with tabs a word may be a space.
    """

    kind: Literal["conll"] = "conll"
    path: str  # the file
    word: Column | None = None  # column of the word, from 0 or from the end (-1); None: 0, or 1 in CoNLL-U
    tag: Column | None = None  # column of the tag; None: the last, or 3 in CoNLL-U
    format: Literal["conll", "conllu"] | None = None  # the format; None: by the suffix
    separator: Literal["tab", "spaces"] | None = None  # between columns; None: tab if the file has any, else spaces
    comment: Label | None = None  # lines that begin with this are skipped, too
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")


class MatchedLines(Spec):
    """Lines matched in full by a regular expression with named groups: `source` and `target`, or `text`, optionally
    with `pair` and `label`. With `label` as a setting, all rows have that label: one file per class."""

    kind: Literal["lines"] = "lines"
    path: str  # the file
    pattern: str  # the regular expression
    label: Label | None = None  # label of all rows
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")
    group: str | None = None  # named group of the pattern whose equal values are in one part


class ClassFolders(Spec):
    """One folder per label with one file per text: `pos/001.txt`."""

    kind: Literal["folders"] = "folders"
    path: str  # the folder of the folders
    encoding: Encoding = "utf-8"  # a Python codec: utf-8, latin-1, cp949, …
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction
    split: RowSplit = "spread"  # rows of the part: spread evenly over the file, or contiguous ("rows")


class Shards(Spec):
    """Tokenised text of any size: a folder written by `anyformer data prepare`. `start` and `stop` are fractions of its
    tokens."""

    kind: Literal["shards"] = "shards"
    path: str  # the folder
    start: Probability = 0.0  # beginning of the selected part, as a fraction
    stop: Fraction = 1.0  # end of the selected part, as a fraction


class Digits(Spec):
    """Rows of digits."""

    kind: str
    count: Size  # number of rows
    shortest: Length = 6  # fewest digits of a row
    longest: Length = 11  # most digits of a row


class SortDigits(Digits):
    """3 1 2 -> 1 2 3"""

    kind: Literal["sort"] = "sort"


class CopyDigits(Digits):
    """3 1 2 -> 3 1 2"""

    kind: Literal["copy"] = "copy"


class ReverseDigits(Digits):
    """3 1 2 -> 2 1 3"""

    kind: Literal["reverse"] = "reverse"


class WrittenDates(Spec):
    """tuesday, march 5 1996 -> 1996-03-05, in a dozen formats."""

    kind: Literal["dates"] = "dates"
    count: Size  # number of rows


class Additions(Spec):
    """17+25 -> 42, with numbers of up to `digits` digits, most significant first."""

    kind: Literal["addition"] = "addition"
    count: Size  # number of rows
    digits: Annotated[int, Field(strict=True, ge=1, le=100)] = 3  # most digits of a number


Synthetic = SortDigits | CopyDigits | ReverseDigits | WrittenDates | Additions
SingleSource = Annotated[
    TextFile | ParallelFiles | TableFile | MatchedLines | ConllFile | ClassFolders | Synthetic, *BY_KIND
]


class JoinedSources(Spec):
    """The concatenated rows of several sources."""

    kind: Literal["joined"] = "joined"
    parts: Annotated[tuple[SingleSource, ...], Field(min_length=1)]  # the sources, in this order


class MixedSource(Spec):
    """The rows of one part of a mixture."""

    name: str  # name of the part, as in `task.parts`
    rows: SingleSource  # its source


class MixedSources(Spec):
    """The rows of a mixture of tasks: one source for each name in `task.parts`."""

    kind: Literal["mixed"] = "mixed"
    parts: Annotated[tuple[MixedSource, ...], Field(min_length=1)]  # sources by the name of their part


Source = Annotated[
    TextFile
    | ParallelFiles
    | TableFile
    | MatchedLines
    | ConllFile
    | ClassFolders
    | JoinedSources
    | MixedSources
    | Shards
    | Synthetic,
    *BY_KIND,
]


class Data(Spec):
    """Sources for training, validation and test.

    Relative paths are relative to `root`. Without a root, a path that begins with one of `sets` is found wherever that
    data set is on this machine.
    """

    train: Source  # examples for training
    valid: Source | None = None  # examples for validation, during training; None: none
    test: Source | None = None  # examples for `anyformer evaluate --split test`; None: none
    sets: tuple[str, ...] = ()  # registered data sets (`anyformer data list`) with which paths begin
    # folder of relative paths; empty: the environment variable ANYFORMER_DATA, else the working directory
    root: str = ""
    on_bad_row: Literal["error", "skip"] = "error"  # error: report unreadable rows and stop; skip: leave them out


# -- which sources fit a task -----------------------------------------------------------------------------------------

TEXT, LABELLED, PAIR = ("text",), ("text", "label"), ("source", "target")  # columns of sources that do not name them
TAGGED = ("words", "tags")
NEEDS = {
    TEXT: "text: text, table, lines, conll, folders or shards",
    LABELLED: "labels: table, lines, folders, or text with a label",
    PAIR: "pairs: parallel, table or lines",
    ("text", "pair"): "pairs of texts: table or lines",
    TAGGED: "words with tags: conll or table",
}


def source_faults(source: Source, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
    """Yield what makes a source unfit for a task that reads these columns."""
    needs = NEEDS.get(columns, "labels: table or lines")
    match source:
        case MixedSources(parts=mixed) if task == "mixture":
            for i, one in enumerate(mixed):
                yield from (fault.under(f"parts.{i}.rows") for fault in source_faults(one.rows, "seq2seq", columns))
        case _ if (task == "mixture") != isinstance(source, MixedSources):
            needs = "'mixed', with a source for each of its parts" if task == "mixture" else needs
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case JoinedSources(parts=parts):
            for i, part in enumerate(parts):
                yield from (fault.under(f"parts.{i}") for fault in source_faults(part, task, columns))
        case TextFile(label=str()) if columns not in (TEXT, LABELLED):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case TextFile(label=str(label)) | MatchedLines(label=str(label)) if "label" not in columns:
            yield Fault("label", f"= {label!r}: the task {task} reads no labels: leave it out")
        case TextFile(label=None) | Shards() if columns != TEXT:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ClassFolders() if columns not in (TEXT, LABELLED):
            yield Fault("kind", f"= 'folders': the task {task} needs {needs}")
        case MatchedLines() if columns == TAGGED:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ConllFile() if columns not in (TAGGED, TEXT):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ConllFile(word=int(word), tag=int(tag)) if word == tag:
            yield Fault("tag", f"= {tag}: is also the column of the word")
        case ParallelFiles() | Digits() | WrittenDates() | Additions() if columns != PAIR:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case TextFile() | ParallelFiles() | TableFile() | MatchedLines() | ConllFile() | ClassFolders() | Shards() if (
            source.start >= source.stop
        ):
            yield Fault("start", f"= {source.start}: must be before stop = {source.stop}")
        case ParallelFiles() | TableFile() | MatchedLines() if source.group is not None and source.split == "rows":
            yield Fault(
                "group", f"= {source.group!r}: a hash of it decides the part of a row: leave out split = 'rows'"
            )
        case TableFile() if table_format(source) is None:
            yield unknown_format(source)
            readable = source.model_copy(update={"format": TABLE_FORMATS[0]})
            yield from source_faults(readable, task, columns)  # report the other faults, too
        case MatchedLines(pattern=pattern) if why := _pattern_fault(pattern, columns, source.label):
            yield Fault("pattern", f"= {pattern!r}: {why}")
        case MatchedLines(group=str(group)) if group not in (named := re.compile(source.pattern).groupindex):
            yield Fault("group", f"= {group!r}: the pattern has no group of this name; {did_you_mean(group, named)}")
        case TableFile() if any(getattr(source, name) is None for name in columns):
            if columns == TEXT:
                yield Fault("text", f"is required: the column that the task {task} reads")
            else:
                *first, last = (f"`{name}`" for name in columns)
                yield Fault("", f"the task {task} needs the columns {', '.join(first)} and {last}")
        case TableFile() if source.join != " " and not any(
            isinstance(c, tuple) for c in table_columns(source).values()
        ):
            yield Fault("join", f"= {source.join!r}: is for a list of columns, such as text = ['title', 'body']")
        case TableFile() if numbered := _numbered_names(source):
            kind = "lines of JSON have names: give them, or set header = false for JSON lists"
            kind = "columns of Parquet have names: give them" if table_format(source) == "parquet" else kind
            yield from (Fault(path, f"= {number}: {kind}") for path, number in numbered)
        case TableFile(pair=pair) if pair is not None and "pair" not in columns and "label" in columns:
            yield Fault("pair", f"= {pair!r}: set task.pairs = true, or leave it out: the task reads single texts")
        case Digits() if source.shortest > source.longest:
            yield Fault("shortest", f"= {source.shortest}: must be at most longest = {source.longest}")


def table_columns(source: TableFile) -> dict[str, ColumnNames]:
    """Return the columns that a table names, by what they are read as."""
    roles = ("source", "target", "text", "pair", "label", "words", "tags", "group")
    return {role: name for role in roles if (name := getattr(source, role)) is not None}


def single_columns(columns: dict[str, ColumnNames]) -> dict[str, ColumnName]:
    """Return each column by its key in the source; those of a list have keys such as `text.0`."""
    single: dict[str, ColumnName] = {}
    for role, names in columns.items():
        single |= {f"{role}.{i}": name for i, name in enumerate(names)} if isinstance(names, tuple) else {role: names}
    return single


def _numbered_names(source: TableFile) -> list[tuple[str, int]]:
    """Return the columns by number in files whose columns have names."""
    if table_format(source) in ("tsv", "csv") or (table_format(source) == "jsonl" and not source.header):
        return []
    return [(key, name) for key, name in single_columns(table_columns(source)).items() if isinstance(name, int)]


def _pattern_fault(pattern: str, groups: tuple[str, ...], label: str | None) -> str:
    """Return why a regular expression is invalid, lacks named groups, or has a second label; empty if it is fine."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # patterns whose meaning may change in a later Python
            names = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression ({error})"
    if label is not None and "label" in names:
        return f"has the group (?P<label>...), and label = {label!r} is set: leave out one of them"
    known = {*names, *(["label"] if label else [])}
    missing = " and ".join(f"(?P<{name}>...)" for name in groups if name not in known)
    return missing and f"needs the named groups {missing}"
