"""Reference pages of presets with their sizes, and of recipes with their data."""

import inspect
import re
import tomllib
from importlib import resources
from typing import Any

from anyformer.config import Attention, ModelConfig, Tokens
from anyformer.data.datasets.registry import registry
from anyformer.nn.inspection.count import count
from anyformer.presets import PRESETS
from anyformer.recipe.ready import names, read_recipe
from docs_site.text import NOTE, plain, table

PRESET_INTRO = """Well-known models at their published sizes: `af.presets.NAME()` in Python, `NAME` on the
[command line](cli.md). Sizes are arguments: `af.presets.gpt2(depth=2, width=64, heads=4, vocab=97)`, or
`anyformer count gpt2 depth=2 width=64 heads=4`. Any other field changes by [overrides](../configs.md)."""
RECIPE_INTRO = """Recipes that come with the package: `anyformer train NAME`, with `KEY=VALUE` to change a
[field](recipe.md). `anyformer config show NAME` prints the whole recipe. [Data sets](../data.md) have
their own page, and [results](../results.md) lists what some recipes reach."""


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    head = ["preset", "shape", "parameters", "layers", "d", "heads", "key/value heads", "vocabulary"]
    sizes = table(head, [_sizes(name, preset()) for name, preset in PRESETS.items()])
    about = [f"### {name}\n\n{_about(name)}\n" for name in PRESETS]
    recipes = [f"### {name}\n\n{text}\n" for name in names() for text in [_recipe(name)]]
    first = ["recipe", "task", "data", "model", "steps"]
    rows = [_recipe_row(name) for name in names()]
    return {
        "presets.md": "\n".join([NOTE, "# Presets\n", PRESET_INTRO, "\n## Sizes\n", sizes, "\n## Models\n", *about]),
        "recipes.md": "\n".join(
            [
                NOTE,
                "# Built-in recipes\n",
                RECIPE_INTRO,
                "\n## Overview\n",
                table(first, rows),
                "\n## Recipes\n",
                *recipes,
            ]
        ),
    }


def _sizes(name: str, config: ModelConfig) -> list[str]:
    stacks = config.stacks.values()
    mixers = [block.mixer for stack in stacks for block in stack.unrolled()]
    attention = next(mixer for mixer in mixers if isinstance(mixer, Attention))
    depth = inspect.signature(PRESETS[name]).parameters["depth"].default
    layers = " + ".join([str(depth)] * len(stacks))
    vocab = f"{config.last_input.rows:,}" if isinstance(config.last_input, Tokens) else "–"
    parameters = f"{count(config).parameters:,}"
    sizes = [config.width, attention.heads, attention.groups]
    return [f"[`{name}`](#{name})", config.shape, parameters, layers, *map(str, sizes), vocab]


def _about(name: str) -> str:
    preset = PRESETS[name]
    sizes = [one.name for one in inspect.signature(preset).parameters.values()]
    text = plain(" ".join((inspect.getdoc(preset) or "").split()))
    return f"{text}\n\nArguments: {', '.join(f'`{size}`' for size in sizes)}."


def _toml(name: str) -> dict[str, Any]:
    """Return the tables of a recipe's file, and those that only its base has."""
    raw = tomllib.loads(_text(name))
    return _toml(raw["base"]) | raw if "base" in raw else raw


def _text(name: str) -> str:
    return (resources.files("anyformer.recipe.ready") / f"{name}.toml").read_text(encoding="utf-8")


def _recipe_row(name: str) -> list[str]:
    raw = _toml(name)
    if run := raw.get("model", {}).get("from"):  # it cannot be read without that run
        return [
            f"[`{name}`](#{name})",
            f"`{raw['task']['kind']}`",
            _data(name),
            f"that of the run `{run}`",
            _steps(raw),
        ]
    recipe = read_recipe(name)
    layers = " + ".join(str(stack.depth) for stack in recipe.model.stacks.values())
    model = f"{recipe.model.shape}, {layers} {'layer' if layers == '1' else 'layers'}, d = {recipe.model.width}"
    return [f"[`{name}`](#{name})", f"`{recipe.task.kind}`", _data(name), model, f"{recipe.train.steps:,}"]


def _steps(raw: dict[str, Any]) -> str:
    return f"{raw['train']['steps']:,}"


def _sets(name: str) -> list[str]:
    """Return the data sets of a recipe: registered ones are folders in its paths."""
    return [one for one in registry() if f"'{one}/" in str(_toml(name)["data"])]


def _data(name: str) -> str:
    sets = [f"`{one}`" + " (in the package)" * registry()[one].bundled for one in _sets(name)]
    return ", ".join(sets) or f"made by the program (`{_toml(name)['data']['train']['kind']}`)"


def _recipe(name: str) -> str:
    """Return the comment at the head of a recipe, and the commands that fetch its data and train."""
    text = re.match(r"((?:#[^\n]*\n)*)", _text(name))[1]  # type: ignore[index]
    about = plain(" ".join(line.lstrip("# ") for line in text.splitlines()))
    lines = [f"anyformer data fetch {one}" for one in _sets(name) if not registry()[one].bundled]
    return f"{about}\n\n```text\n" + "\n".join([*lines, f"anyformer train {name}"]) + "\n```"
