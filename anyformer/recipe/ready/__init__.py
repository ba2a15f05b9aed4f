"""Recipes that come with the package, by name, and recipes in files. Imports no torch.

A file may begin with `base = "NAME"`, the name of a recipe or the path of a file, relative to its own folder. Then it
holds only what differs: `io.merge` puts its tables over those of the base.

from_run  `model.from`: the model of a run, except for what the recipe says
"""

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Fault, io
from anyformer.config.spec import close_file, did_you_mean
from anyformer.recipe import Recipe
from anyformer.recipe.ready.from_run import with_body, without_body

DEFAULT = "sort"


def names() -> list[str]:
    return sorted(f.name.removesuffix(".toml") for f in resources.files(__name__).iterdir() if f.name.endswith(".toml"))


def read_recipe(name: str = DEFAULT, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a built-in name or of a file, with some values changed."""
    if name in names():
        tables, remaining = with_body(_built_in(name), overrides)
        return io.override(io.build(Recipe, tables), remaining)
    if Path(name).suffix.lower() not in io.SUFFIXES:
        close = close_file(name, io.SUFFIXES)
        hint = f"did you mean '{close}'?" if close else did_you_mean(name, names())
        raise ConfigError([Fault("", f"'{name}' is neither a recipe nor a file; {hint}")])
    tables = _with_base(Path(name))
    with io.faults_in(name):
        tables, remaining = with_body(tables, overrides)
        recipe = io.build(Recipe, tables)
    return io.override(recipe, remaining)


def schema() -> dict[str, Any]:
    """The JSON schema of recipe files: a whole recipe, or what differs from a `base`, whose tables may be partial."""
    rest = io.schema(Recipe)
    whole = {key: rest.pop(key) for key in ("type", "properties", "required", "additionalProperties")}
    base = {"type": "string", "description": "Another recipe, by name or as a file: this one holds what differs."}
    tables: dict[str, Any] = {key: {} for key in whole["properties"]}
    return {**rest, "anyOf": [whole, {**whole, "properties": {"base": base, **tables}, "required": ["base"]}]}


def _built_in(name: str) -> dict[str, Any]:
    tables = io.parse((resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8"), "toml")
    if "base" not in tables:
        return tables
    below = io.build(Recipe, _built_in(tables.pop("base")))  # of a recipe that comes with anyformer, such a one, too
    return io.merge(Recipe, io.to_data(below), tables)


def _with_base(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the tables of a file over those of its base. `above` are the files that led to this one by their bases."""
    tables = io.read_tables(path)
    if "base" not in tables:
        return tables
    with io.faults_in(path):
        base = _locate(tables.pop("base"), path, above)
    if isinstance(base, str):
        below, _ = with_body(_built_in(base))
        recipe = io.build(Recipe, below)
    else:
        below = _with_base(base, (*above, path))
        with io.faults_in(base):
            below, _ = with_body(below)
            recipe = io.build(Recipe, below)
    return io.merge(Recipe, without_body(io.to_data(recipe), tables), tables)


def _locate(name: Any, path: Path, above: tuple[Path, ...]) -> str | Path:
    """Return the base of a file: the name of a built-in recipe, or the path of another file."""
    if not isinstance(name, str):
        raise ConfigError([Fault("base", f"= {name!r}: must be the name of a recipe, or a file")])
    if name in names():
        return name
    base, chain = path.parent / os.path.expanduser(name), (*above, path)
    if base.suffix.lower() not in io.SUFFIXES:
        what = f"is neither a recipe nor a file; {did_you_mean(name, names())}"
    elif not os.path.isfile(base):  # unlike Path.is_file, it accepts any name
        what = f"no file {base.absolute()}; paths begin at the folder of {path}"
    elif base.resolve() in [file.resolve() for file in chain]:
        what = f"leads back to itself: {' -> '.join(map(str, (*chain, base)))}"
    else:
        return base
    raise ConfigError([Fault("base", f"= {name!r}: {what}")])
