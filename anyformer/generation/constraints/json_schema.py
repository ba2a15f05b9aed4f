r"""JSON schemas as trees of characters: every answer is JSON, and valid.

    object     the `properties` in the order of the schema, those not `required` are optional; there are no others.
               Without `properties`, `additionalProperties` may be a schema: any names with such values
    array      `items`, `minItems`, `maxItems`
    string     `minLength`, `maxLength`, or a `pattern` (see `regex`), where ^ and $ may end alternatives
    integer    of 15 digits at most, or `minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`
    number     15 digits, a fraction of up to 15, an exponent of up to 2: every number is finite
    boolean, null, `const`, `enum`, `anyOf`, `oneOf` (alternatives that cannot both hold), `$ref` within the document

A schema that says nothing of the value, such as {}, allows any. One space may follow a comma or a colon; there are no
others. A definition may contain itself.
Keywords without meaning for values, such as `title`, are ignored; all other keywords are refused.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NoReturn

from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.constraints.json_text import (
    COLON,
    COMMA,
    INTEGER,
    NUMBER,
    any_value,
    array,
    constant,
    free_object,
    integers,
    matching,
    one_of,
    string,
)
from anyformer.generation.constraints.regex import EMPTY, Alt, Node, Ref, Seq, literal, optional

ANNOTATIONS = {
    "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description",
    "discriminator", "examples", "readOnly", "title", "writeOnly",
}  # fmt: skip
WORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set[str](),
    "boolean": set[str](),
    "null": set[str](),
}
CHOICES = ("$ref", "const", "enum", "anyOf", "oneOf")  # each excludes other keywords, except a type with const and enum
MAX_NODES = 20_000  # of a schema


def compile_schema(schema: Mapping[str, object]) -> Node:
    """Return the tree of all texts that a schema allows."""
    try:
        return _Compiler(schema).whole()
    except RecursionError:
        _wrong("schema", "is nested too deeply")


class _Compiler:
    def __init__(self, root: Mapping[str, object]):
        self._root = root
        self._named: dict[str, Node] = {"#": EMPTY}  # definitions; empty while they are being compiled
        self._parts = 0

    def whole(self) -> Node:
        root = self._named["#"] = self.node(self._root, "schema")
        return root

    def node(self, schema: object, path: str) -> Node:
        self._parts += 1
        if self._parts > MAX_NODES:
            _wrong("schema", f"is too large: the limit is {MAX_NODES:,} parts")
        fields = _table(schema, path)
        chosen = [word for word in CHOICES if word in fields]
        if len(chosen) > 1:
            _wrong(path, f"has {chosen[0]} and {chosen[1]}: give one of them")
        kinds = _kinds(fields, path)
        known = {*ANNOTATIONS, *chosen, *(["type"] if chosen in ([], ["const"], ["enum"]) else [])}
        known |= set() if chosen else {word for kind in kinds for word in WORDS[kind]}
        for word in fields:
            if word not in known:
                beside = f" with {chosen[0]}" if chosen else f" for {' or '.join(kinds)}" if kinds else ""
                _wrong(f"{path}.{word}", f"is not supported{beside}")
        match chosen:
            case ["$ref"]:
                return self._reference(fields["$ref"], path)
            case ["const" | "enum" as word]:
                return self._constants(fields, word, kinds, path)
            case ["anyOf" | "oneOf" as word]:
                return self._any(fields[word], f"{path}.{word}", exactly_one=word == "oneOf")
        if not kinds:
            return any_value()
        return Alt(tuple(self._typed(fields, kind, path) for kind in kinds))

    def _typed(self, fields: Mapping[str, Any], kind: str, path: str) -> Node:
        match kind:
            case "object":
                return self._object(fields, path)
            case "array":
                return self._array(fields, path)
            case "string":
                return _string(fields, path)
            case "integer":
                return _integer(fields, path)
            case "number":
                return NUMBER
            case "boolean":
                return Alt((literal("true"), literal("false")))
            case _:
                return literal("null")

    # -- objects and arrays -------------------------------------------------------------------------------------------

    def _object(self, fields: Mapping[str, Any], path: str) -> Node:
        properties = _table(fields.get("properties", {}), f"{path}.properties")
        required = fields.get("required", [])
        if not isinstance(required, Sequence) or isinstance(required, str):
            _wrong(f"{path}.required", "must be a list of names")
        for name in required:
            if name not in properties:
                _wrong(f"{path}.required", f"names {name!r}, which is not among the properties")
        if not isinstance(others := fields.get("additionalProperties", True), bool):
            if properties:
                _wrong(f"{path}.additionalProperties", "must be true or false beside properties")
            return free_object(self.node(others, f"{path}.additionalProperties"))
        later: Node = EMPTY  # the properties from here on, after another
        first: Node = EMPTY  # the same at the beginning of the object
        for name in reversed(list(properties)):
            value = self.node(properties[name], f"{path}.properties.{name}")
            with _under(f"{path}.properties"):
                entry = Seq((constant(name), COLON, value))
            if name in required:
                first, later = Seq((entry, later)), Seq((COMMA, entry, later))
            else:
                first, later = Alt((Seq((entry, later)), first)), Seq((optional(Seq((COMMA, entry))), later))
            if len(required) < len(properties):  # names for what several alternatives end with
                at = f"{path}.properties.{name}"
                self._named |= {f"{at} first": first, f"{at} later": later}
                first, later = Ref(f"{at} first", self._named), Ref(f"{at} later", self._named)
        return Seq((literal("{"), first, literal("}")))

    def _array(self, fields: Mapping[str, Any], path: str) -> Node:
        if "items" not in fields:
            _wrong(path, "needs items: what the array holds")
        least, most = _span(fields, "minItems", "maxItems", path)
        return array(self.node(fields["items"], f"{path}.items"), least, most)

    def _any(self, choices: object, path: str, exactly_one: bool) -> Node:
        if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
            _wrong(path, "must be a list of schemas")
        if exactly_one:
            for (n, left), (m, right) in combinations(enumerate(choices), 2):
                if not self._apart(left, right, path):
                    _wrong(path, f"{n} and {m} may both match: distinguish them by type or const, or use anyOf")
        return Alt(tuple(self.node(choice, f"{path}.{n}") for n, choice in enumerate(choices)))

    def _apart(self, left: object, right: object, path: str, levels: int = 3) -> bool:
        """Return whether no value can be valid for both, as far as `levels` levels show."""
        one, other = (_table(self._resolve(choice, path), path) for choice in (left, right))
        values = [_values(fields) for fields in (one, other)]
        if values[0] is not None and values[1] is not None:
            return not any(a == b for a in values[0] for b in values[1])
        kinds = [
            {_kind(value) for value in held} if held is not None else set(_kinds(fields, path))
            for fields, held in zip((one, other), values, strict=True)
        ]
        broad = [{"number" if kind == "integer" else kind for kind in some} for some in kinds]
        if broad[0] and broad[1] and broad[0].isdisjoint(broad[1]):
            return True
        if broad != [{"object"}, {"object"}] or values != [None, None] or not levels:
            return False
        names = [set(fields.get("required", [])) & set(fields.get("properties", {})) for fields in (one, other)]
        pairs = [(one["properties"][name], other["properties"][name]) for name in names[0] & names[1]]
        return any(self._apart(*pair, path, levels - 1) for pair in pairs)

    # -- references ---------------------------------------------------------------------------------------------------

    def _reference(self, name: object, path: str) -> Node:
        definition = self._find(name, path)
        assert isinstance(name, str)
        if name not in self._named:
            self._named[name] = EMPTY
            self._named[name] = self.node(definition, f"{path}({name})")
        return Ref(name, self._named)

    def _resolve(self, schema: object, path: str) -> object:
        seen = set()
        while isinstance(schema, Mapping) and isinstance(name := schema.get("$ref"), str) and name not in seen:
            seen.add(name)
            schema = self._find(name, path)
        return schema

    def _find(self, name: object, path: str) -> object:
        if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
            _wrong(f"{path}.$ref", f"= {name!r}: must point into this document, as #/$defs/name does")
        at: object = self._root
        for part in name.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(at, Mapping) or part not in at:
                _wrong(f"{path}.$ref", f"= {name!r}: there is no such definition")
            at = at[part]
        return at

    # -- constants ----------------------------------------------------------------------------------------------------

    def _constants(self, fields: Mapping[str, Any], word: str, kinds: Sequence[str], path: str) -> Node:
        values = _values(fields)
        if values is None:
            _wrong(f"{path}.{word}", "must be a list of values")
        fitting = [value for value in values if not kinds or _fits(value, kinds)]
        if not fitting:
            _wrong(f"{path}.{word}", f"holds no value of type {' or '.join(kinds)}" if values else "holds no value")
        with _under(f"{path}.{word}"):
            return one_of(fitting)


def _string(fields: Mapping[str, Any], path: str) -> Node:
    if "pattern" not in fields:
        return string(*_span(fields, "minLength", "maxLength", path))
    if "minLength" in fields or "maxLength" in fields:
        _wrong(f"{path}.pattern", "excludes minLength and maxLength: put the length into the pattern")
    if not isinstance(fields["pattern"], str):
        _wrong(f"{path}.pattern", "must be a string")
    with _under(f"{path}.pattern"):
        return matching(fields["pattern"])


def _integer(fields: Mapping[str, Any], path: str) -> Node:
    bounds = {word: fields[word] for word in WORDS["integer"] if word in fields}
    for word, bound in bounds.items():
        if _kind(bound) not in ("integer", "number") or not math.isfinite(bound):
            _wrong(f"{path}.{word}", f"= {bound!r}: must be a number")
    if not bounds:
        return INTEGER
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    low = max(lows, default=min(-(10**15) + 1, *highs, 0))
    high = min(highs, default=max(10**15 - 1, *lows, 0))
    if low > high:
        _wrong(path, f"has no integer from {low} to {high}")
    return integers(low, high)


# -- reading a schema -------------------------------------------------------------------------------------------------


def _table(schema: object, path: str) -> Mapping[str, Any]:
    if not isinstance(schema, Mapping) or not all(isinstance(name, str) for name in schema):
        _wrong(path, f"must be an object, not {schema!r}"[:80])
    return schema


def _kinds(fields: Mapping[str, Any], path: str) -> list[str]:
    given = fields.get("type", [])
    kinds = [given] if isinstance(given, str) else given
    if not isinstance(kinds, Sequence) or not all(isinstance(kind, str) and kind in WORDS for kind in kinds):
        _wrong(f"{path}.type", f"= {given!r}: must be of {', '.join(WORDS)}")
    return list(kinds)


def _values(fields: Mapping[str, Any]) -> Sequence[Any] | None:
    if "const" in fields:
        return [fields["const"]]
    given = fields.get("enum")
    return given if isinstance(given, list | tuple) else None


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"


def _fits(value: object, kinds: Sequence[str]) -> bool:
    kind = _kind(value)
    whole = isinstance(value, float) and value.is_integer()
    return kind in kinds or (kind == "integer" and "number" in kinds) or (whole and "integer" in kinds)


def _span(fields: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
    least: Any = fields.get(low, 0)
    most: Any = fields.get(high)
    for word, bound in ((low, least), (high, most)):
        if word in fields and (_kind(bound) != "integer" or bound < 0):
            _wrong(f"{path}.{word}", f"= {bound!r}: must be an integer from 0 on")
    if most is not None and least > most:
        _wrong(path, f"has {low} = {least} above {high} = {most}")
    return least, most


@contextmanager
def _under(path: str) -> Iterator[None]:
    """Prefix faults with a path."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(fault.under(path) for fault in error.faults) from None


def _wrong(path: str, message: str) -> NoReturn:
    raise ConfigError([Fault(path, message)])
