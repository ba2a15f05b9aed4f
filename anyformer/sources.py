"""The grammar of data: where examples come from, in files or invented, and which part of them. Imports no torch."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Fault, Spec
from anyformer.config.spec import BY_KIND, Flag, Fraction, Probability, Size

Encoding = str  # a Python codec: utf-8, latin-1, cp949, ...


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
    """Named columns of a .tsv, .csv or .jsonl file; without a header (JSON: lists) they are called 0, 1, 2, ..."""

    kind: Literal["table"] = "table"
    path: str
    source: str | None = None
    target: str | None = None
    text: str | None = None
    pair: str | None = None  # the second text of a pair
    label: str | None = None
    format: Literal["tsv", "csv", "jsonl"] | None = None  # None: by the suffix
    header: Flag = True
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


class SortDigits(Spec):
    """3 1 2 -> 1 2 3"""

    kind: Literal["sort"] = "sort"
    count: Size
    shortest: Size = 6
    longest: Size = 11


class CopyDigits(Spec):
    """3 1 2 -> 3 1 2"""

    kind: Literal["copy"] = "copy"
    count: Size
    shortest: Size = 6
    longest: Size = 11


class ReverseDigits(Spec):
    """3 1 2 -> 2 1 3"""

    kind: Literal["reverse"] = "reverse"
    count: Size
    shortest: Size = 6
    longest: Size = 11


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
Source = Annotated[TextFile | ParallelFiles | TableFile | MatchedLines | Synthetic, *BY_KIND]


class Data(Spec):
    """What is trained on, what is watched, what is reported. Relative paths stand under `root`."""

    train: Source
    valid: Source | None = None
    test: Source | None = None
    root: str = ""  # where relative paths begin; else the environment's ANYFORMER_DATA, else here
    on_bad_row: Literal["error", "skip"] = "error"


# -- what a task asks of them -----------------------------------------------------------------------------------------


TEXT, PAIR = ("text",), ("source", "target")  # what sources give that name no columns
NEEDS = {TEXT: "text: text, table or lines", PAIR: "pairs: parallel, table or lines"}


def misfits(source: Source, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
    """What is wrong with a source for a task that reads these columns."""
    needs = NEEDS.get(columns, "labels: table or lines")
    match source:
        case TextFile() if columns != TEXT:
            yield Fault("kind", f"= 'text': the task {task} needs {needs}")
        case _ if columns != PAIR and not isinstance(source, TextFile | TableFile | MatchedLines):
            yield Fault("kind", f"= '{source.kind}': the task {task} needs {needs}")
        case TextFile() | ParallelFiles() | TableFile() | MatchedLines() if source.start >= source.stop:
            yield Fault("start", f"= {source.start}: must be before stop = {source.stop}")
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


def _unfit(pattern: str, groups: tuple[str, ...]) -> str:
    """Why a pattern cannot find these groups; empty if it can."""
    try:
        there = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        return f"no regular expression ({error})"
    missing = " and ".join(f"(?P<{name}>...)" for name in groups if name not in there)
    return missing and f"needs the named groups: {missing}"
