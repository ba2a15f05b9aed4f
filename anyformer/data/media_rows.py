"""Rows whose texts are references to images, sounds or entries of an array. Imports no torch."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from anyformer.config import MediaKind
from anyformer.config.spec import ConfigError, Fault
from anyformer.data.files import File, Parsed, regular
from anyformer.data.media_files import BadFile, load_arrays
from anyformer.recipe import ArrayFile, ClassFolders, ColumnName, ColumnNames, Data, TableFile, single_columns


def refer(kind: MediaKind, name: str) -> str:
    """Return the reference to a file or to an entry of an array. Raise a `ValueError` for a name that cannot be one."""
    if "<" in name or ">" in name or "\n" in name:
        raise ValueError(f"{name!r}: a file in a reference must not have <, > or a line end in its name")
    return f"<{kind}:{name}>"


def folder_rows(source: ClassFolders, members: Iterable[Path]) -> Parsed:
    """Yield a row for each file of all classes."""
    assert source.media is not None
    for number, path in enumerate(members, 1):
        try:
            if source.media == "audio" and "+" in str(path):
                raise ValueError(f"{str(path)!r}: the name of a sound must not have a +, which joins sounds")
            yield number, {"text": refer(source.media, str(path)), "label": path.parent.name}
        except ValueError as error:
            yield number, str(error)


def array_rows(source: ArrayFile, data: Data) -> tuple[File, Parsed]:
    """Return a row for each entry of an array."""
    try:
        path = regular(source.path, data)
        arrays = load_arrays(str(path))
    except ConfigError as error:
        raise ConfigError(fault.under("path") for fault in error.faults) from None
    except BadFile as error:
        raise ConfigError([Fault("path", str(error))]) from None
    named = {"array": source.array, "labels": source.labels}
    if faults := [
        Fault(key, f"= {name!r}: no such array in {path}; it has {', '.join(arrays)}")
        for key, name in named.items()
        if name not in arrays
    ]:
        raise ConfigError(faults)
    entries, labels = arrays[source.array], arrays[source.labels]
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        what = f"{labels.dtype} {list(labels.shape)}: labels are strings or whole numbers [n]"
        raise ConfigError([Fault("labels", f"= {source.labels!r}: is {what}")])
    if entries.ndim == 0 or len(entries) != len(labels):
        counts = f"{source.array!r} has the shape {list(entries.shape)}, and there are {len(labels)} labels"
        raise ConfigError([Fault("array", counts)])
    return File(str(path), "utf-8", ""), _entries(source, str(path), labels)


def _entries(source: ArrayFile, path: str, labels: np.ndarray) -> Parsed:
    for i, label in enumerate(labels.tolist()):
        yield i + 1, {"text": refer(source.media, f"{path}#{source.array}/{i}"), "label": str(label)}


def media_columns(source: TableFile, columns: dict[str, ColumnNames]) -> dict[str, MediaKind]:
    """Return the kind of media in each column that holds paths, by the key of the column in the source."""
    kinds: dict[ColumnName, MediaKind] = {}
    both: tuple[tuple[MediaKind, ColumnNames | None], ...] = (("image", source.images), ("audio", source.sounds))
    for kind, names in both:
        listed = () if names is None else names if isinstance(names, tuple) else (names,)
        kinds |= dict.fromkeys(listed, kind)
    return {key: kinds[name] for key, name in single_columns(columns).items() if name in kinds}


def with_references(rows: Parsed, columns: dict[str, MediaKind], folder: Path) -> Parsed:
    """Yield rows whose paths, relative to a folder, have become references; blank cells remain."""
    for number, row in rows:
        if isinstance(row, str):
            yield number, row
            continue
        try:
            for key, kind in columns.items():
                names = row[key].strip().split("+") if kind == "audio" else [row[key].strip()]
                row[key] = refer(kind, "+".join(str(folder / name) for name in names)) if any(names) else ""
        except ValueError as error:
            yield number, str(error)
        else:
            yield number, row
