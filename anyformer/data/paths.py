"""Files that the data of a recipe names, and data sets that it needs and that are not here. Imports no torch."""

from collections.abc import Iterator
from typing import assert_never

from anyformer.config.spec import ConfigError, Fault
from anyformer.data.files import set_of
from anyformer.datasets.registry import lookup
from anyformer.datasets.storage import find
from anyformer.recipe import (
    Additions,
    ArrayFile,
    ClassFolders,
    ConllFile,
    Data,
    Digits,
    JoinedSources,
    KeyToDoorWalks,
    MatchedLines,
    MixedSources,
    ParallelFiles,
    PassKeys,
    Scenes,
    Shards,
    SingleSource,
    SoundFiles,
    SquadFile,
    TableFile,
    TextFile,
    Trajectories,
    WrittenDates,
    splits,
)


def named(data: Data) -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe's data that name files or folders, and these names."""
    for at, source in single_sources(data):
        yield from _named(source, at)


def single_sources(data: Data) -> Iterator[tuple[str, SingleSource | Shards]]:
    """Yield the keys of a recipe's sources and these sources; each part of a joined or mixed one by itself."""
    for _, key, _, source in splits(data):
        match source:
            case JoinedSources(parts=parts):
                yield from ((f"{key}.parts.{i}", part) for i, part in enumerate(parts))
            case MixedSources(parts=mixed):
                yield from ((f"{key}.parts.{i}.rows", one.rows) for i, one in enumerate(mixed))
            case _:
                yield key, source


def _named(source: SingleSource | Shards, at: str) -> Iterator[tuple[str, str]]:
    match source:
        case TextFile() | TableFile() | MatchedLines() | ConllFile() | SquadFile() | ClassFolders() | ArrayFile():
            yield f"{at}.path", source.path
        case Shards() | SoundFiles() | Trajectories():
            yield f"{at}.path", source.path
        case ParallelFiles():
            yield f"{at}.source", source.source
            yield f"{at}.target", source.target
        case Digits() | WrittenDates() | Additions() | PassKeys() | Scenes() | KeyToDoorWalks():
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
