"""KEY=VALUE for a drafted recipe: the lines that it changes. Imports no torch."""

import json
from functools import reduce
from itertools import takewhile
from typing import Any

from anyformer.config import ConfigError, Fault, io
from anyformer.config.overrides import assignment
from anyformer.config.spec import Spec, fields
from anyformer.recipe import Recipe
from anyformer.recipe.ready.from_run import FROM, with_body
from anyformer.training.new_recipe.models import RecipeLine, Sections, as_toml

Path = tuple[str, ...]


def override_lines(sections: Sections, overrides: tuple[str, ...]) -> Sections:
    """Return the lines of a recipe with some settings changed: each in its line, or in a new one of its section."""
    paths = [tuple(takewhile(_is_name, assignment(text)[0].split("."))) for text in overrides]
    if (FROM.partition(".")[0], "from") in paths:
        raise ConfigError([Fault(FROM, "is set by --from")])
    wanted, changed = _read(sections, overrides), {name: list(lines) for name, lines in sections.items()}
    for path in paths:
        _put(changed, path, wanted)
    changed = {name: lines for name, lines in changed.items() if lines}
    if _read(changed, ()) != wanted:
        what = "cannot be written into the drafted recipe: leave it out, and edit the recipe"
        raise ConfigError([Fault("KEY=VALUE", f"= {' '.join(overrides)}: {what}")])
    return changed


def _is_name(step: str) -> bool:
    return step != "*" and not step.isdecimal()


def _read(sections: Sections, overrides: tuple[str, ...]) -> Recipe:
    tables, remaining = with_body(io.parse(as_toml(sections), "toml"), overrides)
    return io.override(io.build(Recipe, tables), remaining)


def _put(sections: Sections, path: Path, recipe: Recipe) -> None:
    """Change the line that a setting lies in; lines below it are replaced by it, and a derived value has none."""
    home = max((name for name in sections if _steps(name) == path[:-1][: len(_steps(name))]), key=len)
    for name, lines in sections.items():
        full = [(*_steps(name), *line.key.split(".")) for line in lines]
        for i, own in enumerate(full):
            if own == path[: len(own)]:  # the setting lies in this line
                lines[i] = RecipeLine(lines[i].key, toml(_value(recipe, own)), "as given")
                if _value(recipe, own) is None:
                    del lines[i]
                return
        lines[:] = [line for line, own in zip(lines, full, strict=True) if own[: len(path)] != path]
    if (value := _value(recipe, path)) is not None:
        sections[home].append(RecipeLine(".".join(path[len(_steps(home)) :]), toml(value), "as given"))


def _steps(name: str) -> Path:
    return tuple(name.split(".")) if name else ()


def _value(recipe: Recipe, path: Path) -> Any:
    return reduce(getattr, path, recipe)


# -- TOML -------------------------------------------------------------------------------------------------------------


def toml(value: Any) -> str:
    """Return a value, or a spec without its defaults, as TOML on one line."""
    match value:
        case Spec():
            known = fields(type(value))
            given = {
                name: inner
                for name in known
                if (inner := getattr(value, name)) != known[name].default or name == "kind"
            }
            return toml(given)
        case dict():
            return "{ " + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + " }"
        case tuple() | list():
            return "[" + ", ".join(map(toml, value)) + "]"
        case str():
            return f"'{value}'" if "\\" in value and "'" not in value else json.dumps(value, ensure_ascii=False)
        case bool():
            return str(value).lower()
        case _:
            return str(value)
