"""The JSON schema of a spec, by which editors complete, explain and check configs. Imports no torch."""

import ast
import inspect
import io
import sys
import tokenize
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from anyformer.config.spec import Spec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(cls: type[Spec]) -> dict[str, Any]:
    """Pydantic's schema with the meaning of every field; unions by kind also accept the bare word of each kind that
    needs no further fields."""
    whole = cls.model_json_schema()
    defs = whole.get("$defs", {})
    _add_words(whole, defs)
    _describe(whole, cls)
    for name, spec in nested_specs(cls).items():
        _describe(defs.get(name, {}), spec)
    return {"$schema": DIALECT, **whole}


def nested_specs(cls: type[Spec]) -> dict[str, type[Spec]]:
    """Return the spec and all specs inside its fields, by name, in the order of the fields."""
    found: dict[str, type[Spec]] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, Spec):
            for choice in kind.choices():
                if choice.__name__ not in found:
                    found[choice.__name__] = choice
                    for field in choice.model_fields.values():
                        visit(field.annotation)
        elif get_origin(kind) is not Literal:
            for part in get_args(kind):
                visit(part)

    visit(cls)
    return found


def meanings(cls: type[Spec]) -> dict[str, str]:
    """Return the meaning of each field: the comment beside it in the source, or the comment lines above it.

    Fields without a comment are left out, and so is everything where Python has no source.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Spec) and base is not Spec:
            found |= _comments(base.__module__).get(base.__qualname__, {})
    return {name: found[name] for name in cls.model_fields if name in found}


@cache
def _comments(module: str) -> dict[str, dict[str, str]]:
    """Return the comments of a module's fields, by class and field."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    alone = {line for line, token in comments.items() if token.line.lstrip().startswith("#")}
    found: dict[str, dict[str, str]] = {}
    for cls in ast.parse(source).body:
        for node in cls.body if isinstance(cls, ast.ClassDef) else ():
            if isinstance(cls, ast.ClassDef) and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above = node.lineno
                while above - 1 in alone:
                    above -= 1
                own = [line for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments]
                if lines := own or range(above, node.lineno):
                    text = " ".join(comments[line].string.lstrip("# ") for line in lines)
                    found.setdefault(cls.name, {})[node.target.id] = text
    return found


def _describe(node: dict[str, Any], cls: type[Spec]) -> None:
    for name, text in meanings(cls).items():
        if name in node.get("properties", {}):
            node["properties"][name]["description"] = text


def _add_words(node: Any, defs: dict[str, Any]) -> None:
    if isinstance(node, list):
        for value in node:
            _add_words(value, defs)
    elif isinstance(node, dict):
        for value in node.values():
            _add_words(value, defs)
        if "discriminator" in node:
            homes: dict[str, str] = node["discriminator"]["mapping"]
            plain = [kind for kind, ref in homes.items() if not defs[ref.removeprefix("#/$defs/")].get("required")]
            # A member fits any table that leaves out the kind, which has a default in the class but not in a union.
            usual = homes.get(node.pop("default_kind", ""))
            tables = [m if m["$ref"] == usual else {**m, "required": ["kind"]} for m in node["oneOf"]]
            node["oneOf"] = [*tables, {"enum": plain}] if plain else tables


def typed(field: Any) -> Any:
    """Return the type of a field with its range."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
