"""Rows of sounds whose file names have their labels: one file each, or several joined at random. Imports no torch."""

import re
from random import Random

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.files import locate
from anyformer.data.readers import Rows
from anyformer.recipe import Root, SoundFiles, Split


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
    try:
        folder, pattern = locate(source.path, data), re.compile(source.pattern)
    except ConfigError as error:
        raise ConfigError(fault.under("path") for fault in error.faults) from None
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
