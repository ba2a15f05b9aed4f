"""Folders of data sets on this machine: ANYFORMER_DATA, then the user's cache folder, then the package.

A file appears under its name only when it is complete and verified by SHA-256, so several processes may fetch or
unpack the same data set at once.
"""

import gzip
import hashlib
import lzma
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.datasets.registry import DataSet, UpstreamFile, lookup
from anyformer.kernels.conventions import user_cache
from anyformer.runs.processes import locked

CHUNK = 2**18  # bytes that are read at once
PARTIAL = ".partial"  # folder of unfinished files, beside the data sets

State = Literal["bundled", "present", "not present"]


def cache_folder() -> Path:
    """Return the folder of fetched and unpacked data sets: `anyformer/data` in the user's cache folder."""
    return user_cache("data")


def download_folder() -> Path:
    """Return the folder in which `anyformer data fetch` writes: ANYFORMER_DATA if it is set, else the cache."""
    return _homes()[0]


def _homes() -> list[Path]:
    given = os.environ.get("ANYFORMER_DATA")
    return [*([Path(os.path.expanduser(given))] if given else []), cache_folder()]


def find(name: str) -> Path | None:
    """Return where a file of a data set is, by its name `SET/PATH`; None if it is not on this machine.

    A file of a bundled data set is unpacked into the cache on first use.
    """
    for home in _homes():
        if (home / name).exists():
            return home / name
    found = lookup(name)
    return unpack(*found, cache_folder()) if found and found[0].bundled else None


def state(data_set: DataSet) -> State:
    """Return whether a data set is on this machine: in a folder, or only inside the package."""
    for home in _homes():
        if all((home / data_set.name / file.path).is_file() for file in data_set.files):
            return "present"
    return "bundled" if data_set.bundled else "not present"


def unpack(data_set: DataSet, file: UpstreamFile, home: Path) -> Path:
    """Unpack a file of a bundled data set to its place below `home`, and return its path."""
    try:
        with placing(data_set, file, home) as partial:
            if partial is not None:
                packed = resources.files("anyformer.data.datasets") / "bundled" / data_set.name / f"{file.path}.xz"
                with packed.open("rb") as raw, lzma.open(raw) as content:
                    copy(content, partial)
                if sha256_of(partial) != file.sha256:
                    partial.unlink()
                    raise ConfigError([Fault(str(packed), "is damaged: install anyformer again")])
    except OSError as error:
        where = visible(str(home / data_set.name))
        hint = "set XDG_CACHE_HOME or ANYFORMER_DATA to another folder"
        raise ConfigError([Fault(where, f"cannot be written: {error.strerror}; {hint}")]) from None
    return home / data_set.name / file.path


@contextmanager
def placing(data_set: DataSet, file: UpstreamFile, home: Path) -> Iterator[Path | None]:
    """Yield the path of an unfinished file, to be completed and verified; None if the file is in its place already.

    At the end it is moved to its place, unpacked if upstream it is a .gz. One process at a time completes a file.
    """
    target, partial = home / data_set.name / file.path, home / PARTIAL / file.sha256
    with locked(partial.parent, f"{file.sha256}.lock", target=target, wait=True):
        if target.is_file():
            yield None
            return
        yield partial
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.packed:
            unpacked = partial.with_suffix(".unpacked")
            with gzip.open(partial) as content:
                copy(content, unpacked)
            unpacked.replace(target)
            partial.unlink()
        else:
            partial.replace(target)


def copy(content: BufferedIOBase, path: Path) -> None:
    """Write a new file and sync it to disk; if that fails, remove it."""
    try:
        with path.open("wb") as out:
            shutil.copyfileobj(content, out, CHUNK)
            out.flush()
            os.fsync(out.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
