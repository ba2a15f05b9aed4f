"""Finding, unpacking and decoding files, whatever is in them. Imports no torch."""

import codecs
import contextlib
import encodings.aliases
import gzip
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from anyformer.config.spec import LARGEST, ConfigError, Fault, close_to, did_you_mean, faults_under, visible
from anyformer.data.datasets.registry import lookup, registry
from anyformer.data.datasets.storage import find
from anyformer.kernels.hardware import usable_memory
from anyformer.recipe.data import Data, named_files
from anyformer.recipe.source import FileSource, Root


class File(NamedTuple):
    """A decoded file. Bytes that its encoding does not know are lone surrogates U+DC00 to U+DCFF."""

    name: str
    encoding: str
    text: str

    def lines(self) -> list[str]:
        """Return the lines without line ends; text after the last one is a line unless it is empty."""
        lines = self.text.replace("\r\n", "\n").split("\n")
        return lines if lines[-1] else lines[:-1]

    def flaw(self, part: str) -> str:
        """Why this part of the file is no text; empty if it is."""
        if (found := FLAW.search(part)) is None:
            return ""
        code = ord(found[0])
        if 0xDC00 <= code <= 0xDCFF:
            return f"byte 0x{code - 0xDC00:02x} is not {self.encoding}; set `encoding`"
        return unfit(found[0])


UNPACKED_RATIO = 100  # a .gz of text is 3 to 20 times as large when unpacked
UNPACKED_BYTES = 2**28  # that any packed file may have
MAX_SMALL = 8 * 2**20  # bytes of a file that is read for one example
PIECE = 2**24  # bytes that are read at once
TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")  # of the files that are read in a folder of texts

# Rows of a reader: the line, and a value for each column or the reason why there is none.
Parsed = Iterator[tuple[int, dict[str, str] | str]]

FLAW = re.compile("[\0\ud800-\udfff]")


def unfit(character: str) -> str:
    """Return why a character cannot be in a text."""
    return "holds a NUL character" if character == "\0" else f"holds the lone surrogate U+{ord(character):04X}"


def open_files(source: FileSource, data: Root, *keys: str) -> dict[str, File]:
    """The files that some fields of a source name, by field."""
    faults, files = list(unknown(source.encoding)), {}
    for key in keys:
        try:
            name, raw = read_bytes(getattr(source, key), data)
            files[key] = File(name, source.encoding, "" if faults else decode(raw, source.encoding, name))
        except ConfigError as error:
            faults += [fault.under(key) for fault in error.faults]
    if faults:
        raise ConfigError(faults)
    return files


def are_small(names: Sequence[str], data: Root) -> bool:
    """Return whether all of these are files that are quickly read."""
    paths = [locate(name, data) for name in names]
    return all(path.is_file() and path.stat().st_size <= MAX_SMALL for path in paths)


def files_below(folder: Path) -> list[Path]:
    """Return the files in a folder and in all folders below it, without hidden ones, by name."""
    found = list[Path]()
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(found)


def is_text_file(path: Path) -> bool:
    """Return whether a file of a folder of texts is one of them, by its suffix."""
    return path.name.lower().removesuffix(".gz").endswith(TEXT_SUFFIXES)


def open_below(folder: str, path: Path, encoding: str) -> File:
    """A file in the folder that a source names."""
    if faults := list(unknown(encoding)):
        raise ConfigError(faults)
    with faults_under("path"):
        name, raw = _read(folder, path)
        return File(name, encoding, decode(raw, encoding, name))


def read_bytes(name: str, data: Root) -> tuple[str, bytes]:
    """The path of a file, and its bytes."""
    return _read(name, regular(name, data))


def _read(name: str, path: Path) -> tuple[str, bytes]:
    shown = visible(str(path))
    try:
        with path.open("rb") as raw:
            return shown, _read_all(raw, path)
    except UNREADABLE as error:
        raise _fault(name, f"{shown} {why_unreadable(error)}") from None


class TooLarge(Exception):
    """More bytes than are read into memory."""


def _read_all(raw: IO[bytes], path: Path) -> bytes:
    """All bytes of an open file, or `TooLarge`: a small .gz may unpack to more than any memory."""
    size, (most, why) = os.fstat(raw.fileno()).st_size, _memory_limit()
    if is_packed(path):
        most, why = max_unpacked(size, "unpack it first")
        what = f"unpacks to more than {most / 2**20:,.0f} MiB"
    else:
        what = f"has {size / 2**20:,.0f} MiB"
    if size > most:
        raise TooLarge(f"{what}: {why}; `anyformer data prepare` reads texts of any size")
    pieces, read, file = list[bytes](), 0, unpacked(raw, path)
    while piece := file.read(PIECE):
        pieces.append(piece)
        read += len(piece)
        if read > most:
            raise TooLarge(f"{what}: {why}; `anyformer data prepare` reads texts of any size")
    return b"".join(pieces)


def max_unpacked(size: int, remedy: str) -> tuple[int, str]:
    """Return how many bytes a packed file of `size` bytes may have when it is unpacked, and why not more."""
    if (usual := usual_bytes(size)) < max_bytes():
        return usual, unusual(remedy)
    return _memory_limit()


def usual_bytes(size: int, ratio: int = UNPACKED_RATIO) -> int:
    """Return how many bytes a packed file of `size` bytes has at most when it is unpacked, unless it is unusual."""
    return max(UNPACKED_BYTES, ratio * size)


def unusual(remedy: str, ratio: int = UNPACKED_RATIO) -> str:
    """Return why a packed file with more than `usual_bytes` is refused, and how to have it read all the same."""
    return f"over {ratio:,} times its size, which is unusual: {remedy}, if that is right"


def _memory_limit() -> tuple[int, str]:
    return max_bytes(), f"this machine's memory allows {max_bytes() / 2**20:,.0f} MiB"


def max_bytes() -> int:
    """How many bytes of text are read into memory at most: decoded and cut into rows, it takes several times that."""
    there = usable_memory()
    return LARGEST if there is None else there // 4


def regular(name: str, data: Root) -> Path:
    """Where a file is that has an end, as a pipe or a device might not."""
    path = locate(name, data)
    if not stat.S_ISREG(path.stat().st_mode):
        raise _fault(name, f"{visible(str(path))} is not a regular file")
    return path


# Errors of opening and reading a file.
UNREADABLE = (OSError, EOFError, zlib.error, TooLarge)


def unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    """The bytes of an open file, those of a .gz unpacked as they are read."""
    return cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if is_packed(path) else raw


def is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def why_unreadable(error: OSError | EOFError | zlib.error | TooLarge) -> str:
    """The reason in words that follow the name of the file."""
    if isinstance(error, TooLarge):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return f"cannot be read ({error.strerror})"
    return f"is not a whole gzip file ({error})"


def locate(name: str, data: Root) -> Path:
    """Where a file or folder of some name is, or a `ConfigError` that says where it was looked for."""
    if one := set_of(name, data):
        return _in_set(name, one)
    root, origin = _root(data)
    path = Path(os.path.expanduser(root), os.path.expanduser(name))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _fault(name, _missing(name, path, origin)) from None
    except OSError as error:
        raise _fault(name, f"{visible(str(path))} {why_unreadable(error)}") from None
    except ValueError as error:  # a NUL in the name, or what the file system cannot spell
        raise _fault(name, f"cannot be the name of a file ({error})") from None
    return path


def set_of(name: str, data: Root) -> str:
    """Return the registered data set that a path of a recipe begins with; empty if there is none."""
    one = name.partition("/")[0]
    return one if one in data.sets and not data.root else ""


def require_sets(data: Data) -> None:
    """Raise a `ConfigError` of one line, with the command that gets them, if data sets are not on this machine."""
    registered = (name for _, name in named_files(data) if set_of(name, data) and lookup(name))
    missing = dict.fromkeys(set_of(name, data) for name in registered if find(name) is None)
    if missing:
        what = f"not on this machine: {', '.join(missing)}; run `anyformer data fetch {' '.join(missing)}`"
        raise ConfigError([Fault("data.sets", what)])


def _in_set(name: str, one: str) -> Path:
    """Return where a file of a data set is: below ANYFORMER_DATA, in the cache folder, or unpacked from the package."""
    if (path := find(name)) is not None:
        return path
    if lookup(name):
        raise _fault(name, f"not on this machine; run `anyformer data fetch {one}`")
    if os.path.exists(name):  # another file, in a folder that has the name of the data set
        return Path(name)
    files = [f"{one}/{file.path}" for file in registry()[one].files]
    raise _fault(name, f"the data set {one} has no such file; {did_you_mean(name, files)}")


def _fault(name: str, message: str) -> ConfigError:
    return ConfigError([Fault("", f"= {name!r}: {message}")])


def _root(data: Root) -> tuple[str, str]:
    """Return the folder of relative paths, and the setting that it comes from."""
    if data.root:
        return data.root, f"{data.root!r}"
    if root := os.environ.get("ANYFORMER_DATA"):
        return root, f"{root!r}, by the environment variable ANYFORMER_DATA"
    return "", "the current folder"


def _missing(name: str, path: Path, origin: str) -> str:
    message = f"no file {visible(str(path.absolute()))}"
    if not os.path.isabs(os.path.expanduser(name)):
        message += f"; set data.root to the folder where relative paths begin (now it is {origin})"
    with contextlib.suppress(OSError):
        if close := close_to(path.name, os.listdir(path.parent)):
            message += f"; did you mean '{visible(close)}'?"
    return message


def unknown(encoding: str) -> Iterator[Fault]:
    """The fault of an encoding that there is not."""
    if not _is_known(encoding):
        known = {alias.replace("_", "-") for pair in encodings.aliases.aliases.items() for alias in pair}
        close = close_to(encoding.lower().replace("_", "-"), known)
        sure = close is not None and _is_known(close)
        hint = f"did you mean '{close}'?" if sure else "Python's names are right, such as utf-8, latin-1, cp949"
        yield Fault("encoding", f"= {encoding!r}: unknown; {hint}")


def _is_known(encoding: str) -> bool:
    """Return whether it is a codec of Python for text (hex and zip are not)."""
    try:
        codecs.lookup(encoding)
        b"\n".decode(encoding)
    except UnicodeDecodeError:  # half a character of a wide encoding
        return True
    except (LookupError, ValueError):
        return False
    return True


def decode(raw: bytes, encoding: str, name: str) -> str:
    """The text of a file of this name. Bytes that are not text become lone surrogates: see `File`."""
    try:
        text = raw.decode(encoding, "anyformer.mark")
    except UnicodeError as error:
        raise ConfigError([Fault("", f"{name} cannot be read as {encoding} ({error})")]) from None
    return text.removeprefix("\ufeff")


def _mark(error: UnicodeError) -> tuple[str, int]:
    """Undecodable bytes as lone surrogates, so that the rest of the file is read and the line is known."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    end = error.end
    newline = error.object.find(b"\n", error.start + 1, end)
    if newline >= 0 and "\n".encode(error.encoding) == b"\n":  # half a character at the end of a line is only that
        end = newline
    return "".join(chr(0xDC00 + byte) for byte in error.object[error.start : end]), end


codecs.register_error("anyformer.mark", _mark)
