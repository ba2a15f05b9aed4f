"""Files that the data of a recipe names, and data sets that it needs and that are not here. Imports no torch."""

from collections.abc import Iterator
from typing import assert_never

from anyformer.config.spec import ConfigError, Fault
from anyformer.data.files import set_of
from anyformer.datasets.registry import lookup
from anyformer.datasets.storage import find
from anyformer.recipe import (
    Additions,
    ClassFolders,
    ConllFile,
    Data,
    Digits,
    JoinedSources,
    KeyToDoorWalks,
    MatchedLines,
    MixedSources,
    ParallelFiles,
    Shards,
    SoundFiles,
    Source,
    TableFile,
    TextFile,
    Trajectories,
    WrittenDates,
    splits,
)


def named(data: Data) -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe's data that name files or folders, and these names."""
    for _, key, _, source in splits(data):
        yield from _named(source, key)


def _named(source: Source, at: str) -> Iterator[tuple[str, str]]:
    match source:
        case TextFile() | TableFile() | MatchedLines() | ConllFile() | ClassFolders() | SoundFiles() | Shards():
            yield f"{at}.path", source.path
        case Trajectories():
            yield f"{at}.path", source.path
        case ParallelFiles():
            yield f"{at}.source", source.source
            yield f"{at}.target", source.target
        case JoinedSources(parts=parts):
            for i, part in enumerate(parts):
                yield from _named(part, f"{at}.parts.{i}")
        case MixedSources(parts=mixed):
            for i, one in enumerate(mixed):
                yield from _named(one.rows, f"{at}.parts.{i}.rows")
        case Digits() | WrittenDates() | Additions() | KeyToDoorWalks():
            return
        case _:
            assert_never(source)


def require_sets(data: Data) -> None:
    """Raise a `ConfigError` of one line, with the command that gets them, if data sets are not on this machine."""
    registered = (name for _, name in named(data) if set_of(name, data) and lookup(name))
    missing = dict.fromkeys(set_of(name, data) for name in registered if find(name) is None)
    if missing:
        what = f"not on this machine: {', '.join(missing)}; run `anyformer data fetch {' '.join(missing)}`"
        raise ConfigError([Fault("data.sets", what)])
