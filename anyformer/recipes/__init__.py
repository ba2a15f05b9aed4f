"""Recipes that come with the package, by name, and recipes in files. Imports no torch.

from_run  `model.from`: the model of a run, except for what the recipe says
"""

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Fault, io
from anyformer.config.spec import did_you_mean
from anyformer.recipe import Recipe
from anyformer.recipes.from_run import with_body

DEFAULT = "sort"


def names() -> list[str]:
    return sorted(f.name.removesuffix(".toml") for f in resources.files(__name__).iterdir() if f.name.endswith(".toml"))


def read_recipe(name: str = DEFAULT, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a built-in name or of a file, with some values changed."""
    remaining = list(overrides)

    def complete(data: dict[str, Any]) -> dict[str, Any]:
        nonlocal remaining
        data, remaining = with_body(data, remaining)
        return data

    if name in names():
        text = (resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
        recipe = io.loads(Recipe, text, complete=complete)
    elif Path(name).suffix.lower() in io.SUFFIXES:
        recipe = io.load(Recipe, name, complete)
    else:
        raise ConfigError([Fault("", f"'{name}' is neither a recipe nor a file; {did_you_mean(name, names())}")])
    return io.override(recipe, remaining)
