"""The grammar of data: where examples come from, in files or invented, and which part of them. Imports no torch."""

import re
import warnings
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Fault, Spec
from anyformer.config.spec import BY_KIND, Flag, Fraction, Probability, Size, shorten

FORMATS = ("tsv", "csv", "jsonl", "parquet")  # of tables
MAX_NAME = 100  # characters of a path in a message
Encoding = str  # a Python codec: utf-8, latin-1, cp949, ...
Column = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
Digits = Annotated[int, Field(strict=True, ge=1, le=10_000)]


class TextFile(Spec):
    """Plain text for a language model. `start` and `stop` take a part of it, counted in characters; a line that is a
    document is in the part where it begins."""

    kind: Literal["text"] = "text"
    path: str
    encoding: Encoding = "utf-8"
    document: Literal["file", "line"] = "file"  # what one document is
    start: Probability = 0.0
    stop: Fraction = 1.0


class ParallelFiles(Spec):
    """Two files, line by line. Here and below `start` and `stop` take a part of the rows, evenly from all the file."""

    kind: Literal["parallel"] = "parallel"
    source: str
    target: str
    encoding: Encoding = "utf-8"
    start: Probability = 0.0
    stop: Fraction = 1.0


class TableFile(Spec):
    """Named columns of a .tsv, .csv, .jsonl or .parquet file; without a header (JSON: lists) they are called 0, 1, ...

    A column of JSON or Parquet may lie within another: `meta.title`, `translations.0.text`.
    """

    kind: Literal["table"] = "table"
    path: str
    source: str | None = None
    target: str | None = None
    text: str | None = None
    pair: str | None = None  # the second text of a pair
    label: str | None = None
    words: str | None = None  # of a sentence, and their tags: lists of strings, or cells with spaces between them
    tags: str | None = None
    format: Literal["tsv", "csv", "jsonl", "parquet"] | None = None  # None: by the suffix
    header: Flag = True
    encoding: Encoding = "utf-8"
    start: Probability = 0.0
    stop: Fraction = 1.0


def table_format(source: TableFile) -> str | None:
    """Return the format of a table: as given, or by the suffix of its path; None if that is none of `FORMATS`."""
    if source.format is not None:
        return source.format
    suffix = source.path.lower().removesuffix(".gz").rpartition(".")[2]
    return suffix if suffix in FORMATS else None


def unknown_format(source: TableFile) -> Fault:
    known = "must be 'tsv', 'csv', 'jsonl' or 'parquet'"
    return Fault("format", f"cannot be told from the name {shorten(source.path, MAX_NAME)!r}: {known}")


class ConllFile(Spec):
    """Words, one a line, with their tags in columns; a blank line ends a sentence.

    CoNLL-U is apart by tabs, lines that begin with # are comments, and what stands for no word of its own (1-2, 1.1) is
    passed over. Elsewhere a comment begins with "# " and holds no tab in a file whose columns are apart by tabs: with
    columns apart by spaces it could be a word, so there are none. Lines of -DOCSTART- are passed over.
    """

    kind: Literal["conll"] = "conll"
    path: str
    word: Column | None = None  # the number of its column from 0, or from the end: -1; None: 0, and 1 in CoNLL-U
    tag: Column | None = None  # None: the last, and 3 in CoNLL-U
    format: Literal["conll", "conllu"] | None = None  # None: by the suffix
    separator: Literal["tab", "spaces"] | None = None  # of columns; None: tab where the file holds any, else spaces
    encoding: Encoding = "utf-8"
    start: Probability = 0.0
    stop: Fraction = 1.0


class MatchedLines(Spec):
    """Whole lines that a regular expression takes apart by its named groups: `source` and `target`, or `text`, maybe
    with `pair` and `label`."""

    kind: Literal["lines"] = "lines"
    path: str
    pattern: str
    encoding: Encoding = "utf-8"
    start: Probability = 0.0
    stop: Fraction = 1.0


class ClassFolders(Spec):
    """A folder for each label, a file for each text in it: `pos/001.txt`."""

    kind: Literal["folders"] = "folders"
    path: str
    encoding: Encoding = "utf-8"
    start: Probability = 0.0
    stop: Fraction = 1.0


class Shards(Spec):
    """Text as tokens, of any length: a folder that `anyformer data prepare` made. `start` and `stop` take a part of it,
    counted in tokens."""

    kind: Literal["shards"] = "shards"
    path: str
    start: Probability = 0.0
    stop: Fraction = 1.0


class SortDigits(Spec):
    """3 1 2 -> 1 2 3"""

    kind: Literal["sort"] = "sort"
    count: Size
    shortest: Digits = 6
    longest: Digits = 11


class CopyDigits(Spec):
    """3 1 2 -> 3 1 2"""

    kind: Literal["copy"] = "copy"
    count: Size
    shortest: Digits = 6
    longest: Digits = 11


class ReverseDigits(Spec):
    """3 1 2 -> 2 1 3"""

    kind: Literal["reverse"] = "reverse"
    count: Size
    shortest: Digits = 6
    longest: Digits = 11


class WrittenDates(Spec):
    """tuesday, march 5 1996 -> 1996-03-05, in a dozen ways of writing dates."""

    kind: Literal["dates"] = "dates"
    count: Size


class Additions(Spec):
    """17+25 -> 42, with numbers of up to so many digits, the highest digit first."""

    kind: Literal["addition"] = "addition"
    count: Size
    digits: Annotated[int, Field(strict=True, ge=1, le=100)] = 3


Synthetic = SortDigits | CopyDigits | ReverseDigits | WrittenDates | Additions
Part = Annotated[TextFile | ParallelFiles | TableFile | MatchedLines | ConllFile | ClassFolders | Synthetic, *BY_KIND]


class Joined(Spec):
    """The rows of several sources, one after the other."""

    kind: Literal["joined"] = "joined"
    parts: Annotated[tuple[Part, ...], Field(min_length=1)]


class MixedPart(Spec):
    """The rows of one part of a mixture."""

    name: str
    rows: Part


class Mixed(Spec):
    """The rows of the parts of a mixture of tasks, each by the name that it has in `task.parts`."""

    kind: Literal["mixed"] = "mixed"
    parts: Annotated[tuple[MixedPart, ...], Field(min_length=1)]


Source = Annotated[
    TextFile
    | ParallelFiles
    | TableFile
    | MatchedLines
    | ConllFile
    | ClassFolders
    | Joined
    | Mixed
    | Shards
    | Synthetic,
    *BY_KIND,
]


class Data(Spec):
    """What is trained on, what is watched, what is reported. Relative paths stand under `root`."""

    train: Source
    valid: Source | None = None
    test: Source | None = None
    root: str = ""  # where relative paths begin; else the environment's ANYFORMER_DATA, else here
    on_bad_row: Literal["error", "skip"] = "error"


# -- what a task asks of them -----------------------------------------------------------------------------------------


TEXT, LABELLED, PAIR = ("text",), ("text", "label"), ("source", "target")  # what sources give that name no columns
TAGGED = ("words", "tags")
NEEDS = {
    TEXT: "text: text, table, lines, conll, folders or shards",
    LABELLED: "labels: table, lines or folders",
    PAIR: "pairs: parallel, table or lines",
    ("text", "pair"): "pairs of texts: table or lines",
    TAGGED: "words with tags: conll or table",
}


def misfits(source: Source, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
    """What is wrong with a source for a task that reads these columns."""
    needs = NEEDS.get(columns, "labels: table or lines")
    match source:
        case Mixed(parts=mixed) if task == "mixture":
            for i, one in enumerate(mixed):
                yield from (fault.under(f"parts.{i}.rows") for fault in misfits(one.rows, "seq2seq", columns))
        case _ if (task == "mixture") != isinstance(source, Mixed):
            needs = "'mixed' rows, each of one of its parts" if task == "mixture" else needs
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case Joined(parts=parts):
            for i, part in enumerate(parts):
                yield from (fault.under(f"parts.{i}") for fault in misfits(part, task, columns))
        case TextFile() | Shards() if columns != TEXT:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ClassFolders() if columns not in (TEXT, LABELLED):
            yield Fault("kind", f"= 'folders': the task {task} needs {needs}")
        case MatchedLines() if columns == TAGGED:
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ConllFile() if columns not in (TAGGED, TEXT):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case ConllFile(word=int(word), tag=int(tag)) if word == tag:
            yield Fault("tag", f"= {tag}: is the column of the word, too")
        case ParallelFiles() | SortDigits() | CopyDigits() | ReverseDigits() | WrittenDates() | Additions() if (
            columns != PAIR
        ):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case TextFile() | ParallelFiles() | TableFile() | MatchedLines() | ConllFile() | ClassFolders() | Shards() if (
            source.start >= source.stop
        ):
            yield Fault("start", f"= {source.start}: must be before stop = {source.stop}")
        case TableFile() if table_format(source) is None:
            yield unknown_format(source)
            yield from misfits(source.model_copy(update={"format": FORMATS[0]}), task, columns)  # its other faults
        case MatchedLines(pattern=pattern) if why := _unfit(pattern, columns):
            yield Fault("pattern", f"= {pattern!r}: {why}")
        case TableFile() if any(getattr(source, name) is None for name in columns):
            if columns == TEXT:
                yield Fault("text", f"is required: the column that the task {task} reads")
            else:
                *first, last = (f"`{name}`" for name in columns)
                yield Fault("", f"the task {task} needs the columns {', '.join(first)} and {last}")
        case TableFile(pair=str(pair)) if "pair" not in columns and "label" in columns:
            yield Fault("pair", f"= {pair!r}: set task.pairs = true, or leave it out: the task reads single texts")
        case SortDigits() | CopyDigits() | ReverseDigits() if source.shortest > source.longest:
            yield Fault("shortest", f"= {source.shortest}: must be at most longest = {source.longest}")


def shard_faults(source: Source, tokenizer: str, batches: str, framed: bool) -> Iterator[Fault]:
    """What of a recipe does not go with text that is tokens already, or with text that is not."""
    if not isinstance(source, Shards):
        if tokenizer == "data":
            yield Fault("tokenizer", f"= 'data': shards have a tokenizer, and data.train is {source.kind}")
        return
    if tokenizer not in ("data", "file", "run"):
        yield Fault("tokenizer", f"= '{tokenizer}': shards have their own tokenizer, which is 'data'")
    if batches not in ("crops", "ordered"):
        what = "shards are one long text, of which batches are 'crops' or 'ordered'"
        yield Fault("batches.kind", f"= '{batches}': {what}")
    if framed:
        yield Fault("task.framed", "= true: shards hold their texts as they are, each with <eos> behind it")


def _unfit(pattern: str, groups: tuple[str, ...]) -> str:
    """Why a pattern cannot find these groups; empty if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about patterns that may mean something else in a later Python
            there = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        return f"no regular expression ({error})"
    missing = " and ".join(f"(?P<{name}>...)" for name in groups if name not in there)
    return missing and f"needs the named groups: {missing}"
