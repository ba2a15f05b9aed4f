"""References to images, sounds or entries of an array in the place of texts, also of sounds whose file names have their
labels: one file each, or several joined at random. Imports no torch."""

import re
from pathlib import Path
from random import Random

import numpy as np

from anyformer.config import MediaKind
from anyformer.config.spec import ConfigError, Fault, faults_under, visible
from anyformer.data.files import File, Parsed, locate, regular
from anyformer.data.media_files import BadFile, load_arrays
from anyformer.data.readers import Rows, collect, part_of
from anyformer.recipe import ArrayFile, Root, SoundFiles, Split


def refer(kind: MediaKind, name: str) -> str:
    """Return the reference to a file or to an entry of an array. Raise a `ValueError` for a name that cannot be one."""
    if "<" in name or ">" in name or "\n" in name:
        raise ValueError(f"{name!r}: a file in a reference must not have <, > or a line end in its name")
    return f"<{kind}:{name}>"


def array_rows(source: ArrayFile, data: Root) -> Rows:
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
    file = File(str(path), "utf-8", "")
    return collect(part_of(source, _entries(source, str(path), labels)), {"text": file, "label": file})


def _entries(source: ArrayFile, path: str, labels: np.ndarray) -> Parsed:
    for i, label in enumerate(labels.tolist()):
        yield i + 1, {"text": refer(source.media, f"{path}#{source.array}/{i}"), "label": str(label)}


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


def sound_rows(source: SoundFiles, data: Root, split: Split, seed: int) -> Rows:
    """Return references to sounds, as `text` and as `source`, and their labels, as `label` and as `target`.

    Joined sounds depend on the split and, in training, on the seed.
    """
    files = _labelled(source, data)
    rows = [[file] for file in files]
    if source.count is not None:
        rng = Random(f"{split} {seed if split == 'train' else 0}")
        sizes = (rng.randint(source.shortest, source.longest) for _ in range(source.count))
        rows = [rng.choices(files, k=size) for size in sizes]
    texts = [f"<audio:{'+'.join(path for path, _ in row)}>" for row in rows]
    labels = [" ".join(label for _, label in row) for row in rows]
    return Rows.made(visible(source.path), {"text": texts, "label": labels, "source": texts, "target": labels})


def _labelled(source: SoundFiles, data: Root) -> list[tuple[str, str]]:
    """Return the files whose names match the pattern, in the order of their names, each with its label."""
    with faults_under("path"):
        folder, pattern = locate(source.path, data), re.compile(source.pattern)
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        what = f"= {source.path!r}: {visible(str(folder))} cannot be read ({error.strerror})"
        raise ConfigError([Fault("path", what)]) from None
    found = [(str(folder / name), match["label"]) for name in names if (match := pattern.fullmatch(name))]
    if not found:
        raise ConfigError([Fault("pattern", f"= {source.pattern!r}: matches no file name in {visible(str(folder))}")])
    if odd := next((path for path, _ in found if re.search(r"[+<>\n]", path)), None):
        what = f"{visible(odd)}: the path of a sound must not have +, < or >, which references use"
        raise ConfigError([Fault("path", what)])
    return found
