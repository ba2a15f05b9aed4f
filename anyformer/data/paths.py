"""Files that the data of a recipe names, and data sets that it needs and that are not here. Imports no torch."""

from collections.abc import Iterator

from anyformer.config.spec import ConfigError, Fault
from anyformer.data.datasets.registry import lookup
from anyformer.data.datasets.storage import find
from anyformer.data.files import set_of
from anyformer.recipe.data import Data, splits
from anyformer.recipe.source import Source


def named(data: Data) -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe's data that name files or folders, and these names."""
    for at, source in single_sources(data):
        yield from ((f"{at}.{name}", getattr(source, name)) for name in source.files)


def single_sources(data: Data) -> Iterator[tuple[str, Source]]:
    """Yield the keys of a recipe's sources and these sources; each part of a joined or mixed one by itself."""
    for _, key, _, source in splits(data):
        inner = source.inner()
        yield from ((f"{key}.{path}", part) for path, _, part in inner)
        if not inner:
            yield key, source


def require_sets(data: Data) -> None:
    """Raise a `ConfigError` of one line, with the command that gets them, if data sets are not on this machine."""
    registered = (name for _, name in named(data) if set_of(name, data) and lookup(name))
    missing = dict.fromkeys(set_of(name, data) for name in registered if find(name) is None)
    if missing:
        what = f"not on this machine: {', '.join(missing)}; run `anyformer data fetch {' '.join(missing)}`"
        raise ConfigError([Fault("data.sets", what)])
