"""Which fields of a config.json `transformers` reads, as data: `transformers` itself is an optional extra.

`tests/interop/make_transformers_fields.py` writes transformers_fields.json from the installed `transformers`; a test
compares the two.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("transformers_fields.json")


class FamilyFields(NamedTuple):
    """The fields of one family."""

    fields: frozenset[str]  # declared by its config class, or read by its code
    aliases: dict[str, str]  # other names of fields (`attribute_map`)


@functools.cache
def fields_of(kind: str) -> FamilyFields:
    data = json.loads(FILE.read_bytes())
    family = data["families"][kind]
    return FamilyFields(frozenset(data["common"]) | frozenset(family["fields"]), family["aliases"])


@functools.cache
def rope_fields() -> frozenset[str]:
    """The fields of `rope_parameters`, of any type of scaling."""
    return frozenset(json.loads(FILE.read_bytes())["rope_parameters"])
