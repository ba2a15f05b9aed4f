"""Reference pages of configs, recipes, decoding options and grids, from their schemas."""

import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from anyformer.config import ModelConfig, Spec
from anyformer.config.schema import meanings, nested_specs, schema
from anyformer.generation.http.bodies import http_names
from anyformer.generation.strategy import Lookup, Strategy, options
from anyformer.lab.grid import Grid
from anyformer.recipe import Recipe
from docs_site.text import NOTE, docstring, plain, table

MODULES = {  # headings, in the order of the pages
    "model": "Model, initialisation, special ids",
    "block": "Stacks and blocks",
    "attention": "Attention",
    "mixer": "Other mixers",
    "state_mixer": "Mixers with a matrix state",
    "feedforward": "Feed-forwards and activations",
    "norm": "Norms",
    "position": "Positions and rotary scaling",
    "disentangled": "Disentangled positions",
    "pattern": "Attention patterns",
    "inputs": "Inputs",
    "heads": "Heads",
    "media": "Images, sounds and features",
    "adapter": "Adapters",
    "recipe": "Whole recipe",
    "seq2seq_task": "Tasks that answer a source",
    "label_task": "Tasks that give labels, numbers, vectors or spans",
    "text_task": "Other tasks, and numbers as tokens",
    "data": "Data: splits, joined and mixed sources, augmentation",
    "sources": "Data sources",
    "table": "Tables as sources",
    "synthetic": "Synthetic sources",
    "tokenizer": "Tokenizers",
    "batches": "Batches",
    "train": "Training",
    "optimizer": "Optimisers",
    "schedule": "Schedules",
    "logger": "Loggers",
    "width_transfer": "Width transfer",
    "grid": "Grids",
}
Specs = dict[str, type[Spec]]
SPECS = nested_specs(Recipe) | nested_specs(Grid)


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    model = nested_specs(ModelConfig)
    recipe = {name: spec for name, spec in nested_specs(Recipe).items() if name not in model}
    grid = {name: spec for name, spec in nested_specs(Grid).items() if name not in model | recipe}
    homes = dict.fromkeys(model, "model.md") | dict.fromkeys(recipe, "recipe.md")
    intro = "`None` or *unset* means that the field is left out. A bare word means a table with that `kind` alone."
    return {
        "model.md": _page("Fields of a model", MODEL.format(intro=intro), model, homes | dict.fromkeys(model, "")),
        "recipe.md": _page("Fields of a recipe", RECIPE.format(intro=intro), recipe, homes | dict.fromkeys(recipe, "")),
        "decoding.md": _decoding(),
        "grid.md": _page("Fields of a grid", GRID, grid, homes | dict.fromkeys(grid, "")),
    }


MODEL = """Every field of `ModelConfig` and of the parts in it, as [configs](../configs.md) write them in TOML, JSON or
Python. [Parts](../parts.md) explains them with formulae. {intro}"""
RECIPE = """Every field of a recipe, which `anyformer train` reads: see [your data](../your-data.md) and
[training](../training.md). The fields of `model` have [their own page](model.md). {intro}"""
DECODING = """Options of `anyformer generate` and `predict`, of `run.generate` and `af.generate`: see
[decoding](../decoding.md). The options select the strategy: `beams` selects beam search, `candidates` or `alpha`
contrastive search, `draft` or `lookup` speculative decoding. Without any of these it is sampling, which is greedy at
temperature 0."""
GRID = """A grid trains all combinations of some settings under an equal budget: see [comparing](../comparing.md)."""


def _page(title: str, intro: str, specs: Specs, homes: dict[str, str]) -> str:
    modules = sorted({spec.__module__ for spec in specs.values()}, key=lambda name: [*MODULES].index(_last(name)))
    parts = [NOTE, f"# {title}\n", intro + "\n"]
    for module in modules:
        doc = inspect.getdoc(sys.modules[module]) or ""
        first = doc.partition("\n\n")[0].replace(" Imports no torch.", "").replace("\n", " ")
        parts += [f"## {MODULES[_last(module)]}\n", plain(first) + "\n"]
        order = inspect.getsource(sys.modules[module])
        here = [spec for spec in specs.values() if spec.__module__ == module]
        for spec in sorted(here, key=lambda spec: order.index(f"class {spec.__name__}(")):
            parts += [f"### {spec.__name__}\n", docstring(inspect.getdoc(spec) or "") + "\n"]
            if kind := _kind(spec):
                parts.append(f'Selected by `kind = "{kind}"`.\n')
            if rows := list(_rows(spec, homes)):
                parts.append(table(["field", "type", "default", "meaning"], rows) + "\n")
    return "\n".join(parts)


def _decoding() -> str:
    """Return the page of the options of decoding, from their table."""
    parts = [NOTE, "# Options of decoding\n", DECODING + "\n"]
    served = {"temperature": "temperature"} | {name: field for field, (name, _) in http_names().items()}
    owners: list[type[Strategy]] = [Strategy, *Strategy.choices()]
    for owner in owners:
        parts += [f"## {owner.__name__}\n", docstring(inspect.getdoc(owner) or "") + "\n"]
        rows = []
        for name, option in options().items():
            if option.owner is owner:
                kind = _type(TypeAdapter(option.type).json_schema(), {}) or "a run"
                rows.append([f"`{name}`", kind, f"`{served[name]}`" if name in served else "", plain(option.help)])
        parts.append(table(["option", "type", "over HTTP", "meaning"], rows) + "\n")
    parts += ["## Lookup\n", docstring(inspect.getdoc(Lookup) or "") + "\n"]
    parts.append(table(["field", "type", "default", "meaning"], list(_rows(Lookup, {}))) + "\n")
    return "\n".join(parts)


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _rows(spec: type[Spec], homes: dict[str, str]) -> Iterator[list[str]]:
    properties = schema(spec)["properties"]
    for name, field in spec.model_fields.items():
        if name != "kind":
            kind = _type(properties[name], homes)
            default = "*required*" if field.is_required() else _default(field.get_default(call_default_factory=True))
            yield [f"`{name}`", kind, default, plain(meanings(spec)[name])]


def _kind(spec: type[Spec]) -> str:
    return str(spec.model_fields["kind"].default) if "kind" in spec.model_fields else ""


def _default(value: Any) -> str:
    if value is None:
        return "*unset*"
    if isinstance(value, Spec):
        changed = value.model_dump(exclude_defaults=True)
        return f"`{getattr(value, 'kind', '')}`" + (" …" if changed else "") if hasattr(value, "kind") else "`{}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{json.dumps(value, ensure_ascii=False, default=lambda part: part.kind)}`"


def _type(node: dict[str, Any], homes: dict[str, str]) -> str:
    """Return a type in words, with links to the specs that it names."""
    if ref := node.get("$ref"):
        name = ref.removeprefix("#/$defs/")
        return f"[`{_kind(SPECS[name]) or name}`]({homes[name]}#{name.lower()})"
    if "enum" in node:
        return ", ".join(f"`{json.dumps(value)}`" for value in node["enum"])
    if options := node.get("oneOf") or node.get("anyOf"):
        shown = [_type(option, homes) for option in options if option != {"type": "null"} and list(option) != ["enum"]]
        words = [_type(option, homes) for option in options if list(option) == ["enum"] and "oneOf" not in node]
        return ", ".join(dict.fromkeys([*shown, *words]))
    if node.get("type") == "array":
        items = node.get("items") or {}
        inner = [_type(item, homes) for item in node.get("prefixItems", [])]
        return "list of " + (" and ".join(inner) if inner else _type(items, homes) or "values")
    return _number(node)


def _number(node: dict[str, Any]) -> str:
    name = {"integer": "integer", "number": "number", "string": "string", "boolean": "true or false"}.get(
        node.get("type", ""), ""
    )
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    limits = [f"≥ {low:g}"] if low is not None and abs(low) < 2**31 else [f"> {above:g}"] if above is not None else []
    limits += [f"≤ {high:,}"] if high is not None and high < 2**31 - 1 else []
    limits += [f"< {below:g}"] if below is not None and below < 2**31 else []
    return " ".join([name, ", ".join(limits)]).strip()
