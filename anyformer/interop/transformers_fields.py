"""The fields of a config.json that `transformers` reads, and their defaults, as data: it is an optional extra.

`tests/interop/make_transformers_fields.py` writes transformers_fields.json from the installed `transformers`; a test
compares the two.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("transformers_fields.json")


class FamilyFields(NamedTuple):
    """The fields of one family."""

    fields: dict[str, Any]  # declared by its config class, or read by its code; with their defaults, None without one
    aliases: dict[str, str]  # other names of fields (`attribute_map`)


@functools.cache
def fields_of(kind: str) -> FamilyFields:
    data = json.loads(FILE.read_bytes())
    family = data["families"][kind]
    return FamilyFields(dict.fromkeys(data["common"]) | family["fields"], family["aliases"])


@functools.cache
def rope_fields() -> dict[str, Any]:
    """The fields of `rope_parameters`, of any type of scaling; none has a default."""
    return dict.fromkeys(json.loads(FILE.read_bytes())["rope_parameters"])
