"""Write `anyformer/interop/transformers_fields.json`: the config.json fields that `transformers` reads.

Run `python -m tests.interop.make_transformers_fields` after an upgrade of `transformers`. A field counts as read if

- the config class of the family declares it, as a field or as an alias (`attribute_map`);
- the code of the config class takes it out of the keyword arguments;
- the code of the model, or code that every model shares, reads it from the config.

Each has the default that the config class declares: a number, a name or a switch; null where it has none.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import transformers as hf
from transformers import cache_utils, masking_utils, modeling_rope_utils, modeling_utils, quantizers

from anyformer.interop import transformers_fields
from anyformer.interop.families import FAMILIES

TOWERS = ("clip_text_model", "clip_vision_model")  # whose config.json are tables in that of a family
SHARED = (cache_utils, masking_utils, modeling_utils, quantizers.auto)


def made() -> dict[str, Any]:
    """The content of the file, from the `transformers` that is installed."""
    base = hf.PretrainedConfig
    methods = {name for name in dir(base) if callable(getattr(base, name))}
    common = names(base) | kwargs_of(inspect.getsource(base.__post_init__))
    common |= {name for module in SHARED for name in reads(inspect.getsource(module))}
    rope = reads(inspect.getsource(modeling_rope_utils)) | kwargs_of(inspect.getsource(modeling_rope_utils))
    found = {}
    for kind in sorted((*FAMILIES, *TOWERS)):
        config = hf.CONFIG_MAPPING[kind]
        file = Path(inspect.getfile(config))
        model = file.with_name(file.name.replace("configuration", "modeling")).read_text(encoding="utf-8")
        fields = names(config) | set(config.attribute_map) | kwargs_of(file.read_text()) | reads(model)
        if "rope_parameters" in names(config):
            fields |= rope
        given = defaults(config)
        found[kind] = {
            "fields": {name: given.get(name) for name in sorted((fields - common | given.keys()) - methods)},
            "aliases": dict(sorted(config.attribute_map.items())),
        }
    parameters = sorted(modeling_rope_utils.RopeParameters.__annotations__)
    return {"common": sorted(common - methods), "rope_parameters": parameters, "families": found}


def names(config: Any) -> set[str]:
    """The fields that a config class declares."""
    return {field.name for field in dataclasses.fields(config)}


def defaults(config: Any) -> dict[str, Any]:
    """The defaults that a config class declares, without those that the code of the class computes."""
    given = {field.name: field.default for field in dataclasses.fields(config)}
    given = {name: given.get(other) for other, name in config.attribute_map.items()} | given
    return {name: value for name, value in given.items() if isinstance(value, bool | int | float | str)}


def reads(source: str) -> set[str]:
    """Names x in `config.x`, `getattr(config, "x")` and `hasattr(config, "x")`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=of, attr=name) if is_config(of):
                found.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[of, ast.Constant(value=str(name)), *_]) if (
                is_config(of)
            ):
                found.add(name)
    return found


def is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")


def kwargs_of(source: str) -> set[str]:
    """Names x in `kwargs.pop("x")` and `kwargs.get("x")`."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="pop" | "get" | "setdefault"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
    return found


def main() -> None:
    data = made()
    lines = [f" {json.dumps(kind)}: {json.dumps(one)}" for kind, one in data.pop("families").items()]
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in data.items())
    transformers_fields.FILE.write_text("{" + head + '"families": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
