"""Fingerprints of data files, by which a resumed training knows that its data changed. Imports no torch.

A file of up to 16 MiB is hashed as a whole; of a larger one the size and 16 samples of 64 KiB are, evenly spaced
from its first byte to its last: a change that keeps the size and lies between the samples is not found. The files of a
folder (`folders`, `shards`) have one fingerprint together.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.files import locate, require_sets
from anyformer.recipe.data import Data, named_files, single_sources

MAX_HASHED = 2**24  # bytes of a file that is hashed as a whole
SAMPLES, SAMPLE = 16, 2**16  # of a larger one, and the bytes of each

Fingerprints = Mapping[str, str]
"""The size and the SHA-256 of each file or folder, by its key in the recipe: `data.train.path`."""


def fingerprint(data: Data) -> Fingerprints:
    """Return the fingerprints of all files that the data of a recipe names."""
    require_sets(data)
    found: dict[str, str] = {}
    faults: list[Fault] = []
    known: dict[Path, str] = {}  # train and valid are often parts of one file
    for key, name in named_files(data):
        try:
            path = locate(name, data)
            known[path] = found[key] = known.get(path) or _of_path(path)
        except OSError as error:
            faults.append(Fault(key, f"= {name!r}: {visible(str(path))} cannot be read ({error.strerror})"))
        except ConfigError as error:
            faults += [fault.under(key) for fault in error.faults]
    for key, source in single_sources(data):
        if not faults:
            found |= {f"{key}.{name}": text for name, text in source.fingerprints(data)}
    if faults:
        raise ConfigError(faults)
    return found


def changes(before: Fingerprints, now: Fingerprints) -> list[str]:
    """Return the keys of the files that changed."""
    return [key for key, value in now.items() if before.get(key) != value]


def _of_path(path: Path) -> str:
    if not path.is_dir():
        return of_file(path)
    members = sorted(member for member in path.rglob("*") if member.is_file() and not member.name.startswith("."))
    return of_files((member.relative_to(path).as_posix(), member) for member in members)


def of_files(named: Iterable[tuple[str, Path]]) -> str:
    """Return the fingerprint of several files together, by their names."""
    lines = [f"{name}\0{of_file(path)}" for name, path in named]
    digest = hashlib.sha256(os.fsencode("\n".join(lines)))
    return f"{len(lines)} files {digest.hexdigest()}"


def of_file(path: Path) -> str:
    """Return the fingerprint of one file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= MAX_HASHED:
            return f"{size} bytes {hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest = hashlib.sha256()
        for i in range(SAMPLES):
            file.seek((size - SAMPLE) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
        return f"{size} bytes {digest.hexdigest()}"
