"""Values and specs as TOML on one line. Imports no torch."""

import json
from typing import Any

from anyformer.config.spec import Spec, fields


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
