"""Files of any length in chunks of some megabytes, and chunks in documents. Imports no torch.

Reading the same files gives the same chunks: each ends with the document in which its size is reached.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, NamedTuple, assert_never

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.files import UNREADABLE, File, TooLarge, decode, unknown, unpacked, why_unreadable
from anyformer.data.tables import (
    Missing,
    follow,
    open_table,
    parse_object,
    spelt,
    wanted_columns,
)
from anyformer.recipe.table import FORMATS, TableFormat, format_of

SIZE = 8_000_000  # bytes of a chunk
MAX_DOCUMENT = 2**29  # bytes without the end of a line, or an empty line where that ends a document
PIECE = 250_000  # characters that are encoded at once of a document that has no end in sight
Document = Literal["line", "blank", "file"]


class ChunkedFiles(NamedTuple):
    """How files are read."""

    document: Document = "line"  # documents of plain text: lines, paragraphs between empty lines, or whole files
    column: str = "text"  # of records
    encoding: str = "utf-8"


class Chunk(NamedTuple):
    """Some documents of a file."""

    path: Path
    number: int  # of the first line, or row
    content: bytes  # lines; a row of a file that is no text as a line of JSON
    last: bool  # whether the file ends here
    read: int  # bytes of the file up to the end of this chunk, as they are on the disk


class Text(NamedTuple):
    """A document, or a piece of one."""

    text: str
    ends: bool = True


class Bad(NamedTuple):
    """A row that cannot be read."""

    line: int
    why: str


def records_of(path: Path) -> TableFormat | None:
    """Return the format of a file of records, by its suffix; None: text."""
    form = FORMATS.get(format_of(path.name) or "")
    return form if form and form.is_records else None


def is_text(path: Path) -> bool:
    """Return whether a file is text, of documents or of records."""
    return not ((form := records_of(path)) and form.reader)


def check_encoding(encoding: str) -> None:
    """Chunks are cut at a byte that must be the end of a line, and nothing else."""
    if faults := list(unknown(encoding)):
        raise ConfigError(faults)
    if "\n".encode(encoding) != b"\n":
        raise ConfigError([Fault("encoding", f"= {encoding!r}: the end of a line is not one byte in it; write utf-8")])


# -- files in chunks --------------------------------------------------------------------------------------------------

LINE = re.compile(rb"\n")
EMPTY_LINE = re.compile(rb"\n\r?\n(?=[^\r\n])")  # the last, where several are together


def read_chunks(path: Path, how: ChunkedFiles, size: int = SIZE) -> Iterator[Chunk]:
    """Yield a file in chunks: `size` bytes, extended to the end of a document."""
    try:
        form = records_of(path)
        if form and form.reader:
            yield from _row_chunks(path, form, how, size)
            return
        blank = form is None and how.document == "blank"
        with path.open("rb") as raw:
            yield from _line_chunks(path, raw, EMPTY_LINE if blank else LINE, size)
    except UNREADABLE as error:
        raise ConfigError([Fault("", f"{visible(str(path))} {why_unreadable(error)}")]) from None


def _line_chunks(path: Path, raw: IO[bytes], end: re.Pattern[bytes], size: int) -> Iterator[Chunk]:
    number, held, file = 1, bytearray(), unpacked(raw, path)
    searched = size - 3  # no chunk ends before: an end of three bytes may begin there
    while more := file.read(size):
        held += more
        while (found := end.search(held, max(0, searched))) and found.end() < len(held):
            content = bytes(held[: found.end()])
            yield Chunk(path, number, content, False, raw.tell())
            number += content.count(b"\n")
            del held[: len(content)]
            searched = size - 3
        searched = max(size - 3, len(held) - 3)
        if len(held) > MAX_DOCUMENT:
            raise TooLarge(f"has a document of more than {MAX_DOCUMENT / 2**20:,.0f} MiB, from line {number} on")
    yield Chunk(path, number, bytes(held), True, raw.tell())


def _row_chunks(path: Path, form: TableFormat, how: ChunkedFiles, size: int) -> Iterator[Chunk]:
    table, bytes_in_all = open_table(path, form), path.stat().st_size
    number, held, total = 0, list[bytes](), 0
    for number, row in table.rows(wanted_columns(table.names, path, {"column": how.column})):
        held.append(json.dumps(row, default=str).encode())
        total += len(held[-1])
        if total >= size:
            done = bytes_in_all * number // table.count
            yield Chunk(path, number - len(held) + 1, b"\n".join(held), False, done)
            held, total = [], 0
    yield Chunk(path, number - len(held) + 1, b"\n".join(held), True, bytes_in_all)


# -- chunks in documents ----------------------------------------------------------------------------------------------


def documents(chunk: Chunk, how: ChunkedFiles) -> Iterator[Text | Bad]:
    """The documents of a chunk, and the rows of which there is none."""
    encoding = how.encoding if is_text(chunk.path) else "utf-8"
    file = File(str(chunk.path), encoding, decode(chunk.content, encoding, str(chunk.path)))
    clean = not file.flaw(file.text)
    good = []
    for number, line in enumerate(file.lines(), chunk.number):
        if not clean and (why := file.flaw(line)):
            yield Bad(number, why)
        else:
            good.append((number, line))
    if records_of(chunk.path):
        yield from (_field(number, line, how.column) for number, line in good if line)
    elif how.document == "line":
        yield from (Text(line) for _, line in good if line.strip())
    elif how.document == "blank":
        for _, paragraph in itertools.groupby((line for _, line in good), key=lambda line: bool(line.strip())):
            if (text := "\n".join(paragraph)).strip():
                yield Text(text)
    elif how.document == "file":
        yield from _pieces([line for _, line in good], chunk)
    else:
        assert_never(how.document)


def _field(number: int, line: str, column: str) -> Text | Bad:
    fields = parse_object(line)
    if isinstance(fields, str):
        return Bad(number, fields)
    value = follow(fields, column)
    if isinstance(value, Missing):
        return Bad(number, value.told(column))
    text, why = spelt(value, column, "text")
    if not why and not text.strip():
        why = "the text is empty"
    return Bad(number, why) if why else Text(text)


def _pieces(lines: list[str], chunk: Chunk) -> Iterator[Text]:
    """A file, or what of it is in a chunk, in pieces that can be encoded at once."""
    if chunk.number == 1 and chunk.last and not any(map(str.strip, lines)):
        return
    held, size = list[str](), 0
    for line in lines:
        held.append(f"{line}\n")
        size += len(held[-1])
        if size >= PIECE:
            yield Text("".join(held), ends=False)
            held, size = [], 0
    text = "".join(held)
    if chunk.last:
        yield Text(text if chunk.content.endswith(b"\n") else text.removesuffix("\n"))
    elif text:
        yield Text(text, ends=False)
