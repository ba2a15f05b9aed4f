"""The JSON schema of a spec, by which editors complete and check configs. Imports no torch."""

from typing import Any

from anyformer.config.spec import Spec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(cls: type[Spec]) -> dict[str, Any]:
    """Pydantic's schema, and in every union by kind also the bare word of each kind that needs no further fields."""
    whole = cls.model_json_schema()
    _add_words(whole, whole.get("$defs", {}))
    return {"$schema": DIALECT, **whole}


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
