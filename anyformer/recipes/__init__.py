"""Recipes that come with the package, by name, and recipes in files. Imports no torch."""

from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from anyformer.config import ConfigError, Fault, io
from anyformer.config.spec import did_you_mean
from anyformer.recipe import Recipe

DEFAULT = "sort"


def names() -> list[str]:
    return sorted(f.name.removesuffix(".toml") for f in resources.files(__name__).iterdir() if f.name.endswith(".toml"))


def read_recipe(name: str = DEFAULT, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a built-in name or of a file, with some values changed."""
    if name in names():
        text = (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
        recipe = io.loads(Recipe, text)
    elif Path(name).suffix in io.SUFFIXES:
        recipe = io.load(Recipe, name)
    else:
        raise ConfigError([Fault("", f"'{name}' is neither a recipe nor a file; {did_you_mean(name, names())}")])
    return io.override(recipe, overrides)
