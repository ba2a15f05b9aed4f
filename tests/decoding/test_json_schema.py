"""JSON schemas as constraints: what is written is valid, and what is valid can be written."""

import itertools
import json
import random
import re
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, Field

from anyformer.generation.constraints.text_constraint import JsonSchema
from tests.decoding.toy_tokens import refused, spelt, text_of, toy, walk

names = st.sampled_from(["a", "b", "name", "한", 'q"', "c\\"])
scalars = (
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([0.5, -1e9]) | st.text('a"\\\n한', max_size=3)
)
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(names, scalars, max_size=2)


def spans(low: str, high: str) -> st.SearchStrategy[dict[str, int]]:
    pair = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted)
    return (
        pair.map(lambda p: {low: p[0], high: p[1]}) | pair.map(lambda p: {low: p[0]}) | pair.map(lambda p: {high: p[1]})
    )


leaves = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]),
    st.sampled_from([{"type": ["string", "null"]}, {"$ref": "#/$defs/one"}, {"$ref": "#/$defs/tree"}]),
    spans("minLength", "maxLength").map(lambda span: {"type": "string", **span}),
    st.sampled_from(["^a+$", '["\\\\]', "^.b", "[0-9]{2}$", "^(x|\n)*$", "^[^가-힣]$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.tuples(st.integers(-150, 150), st.integers(0, 1200)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ),
    st.integers(-20, 20).map(lambda bound: {"type": "integer", "exclusiveMinimum": bound - 0.5}),
    values.map(lambda value: {"const": value}),
    st.lists(values, min_size=1, max_size=3).map(lambda some: {"enum": some}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    tables = st.dictionaries(names, st.tuples(inner, st.booleans()), max_size=4)
    return tables.map(
        lambda table: {
            "type": "object",
            "properties": {name: schema for name, (schema, _) in table.items()},
            "required": [name for name, (_, needed) in table.items() if needed],
        }
    )


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.tuples(inner, spans("minItems", "maxItems")).map(lambda p: {"type": "array", "items": p[0], **p[1]})
    choices = st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    return objects(inner) | arrays | choices


TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}, "required": ["v"]}
DEFINITIONS: dict[str, Any] = {"one": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "tree": TREE}
schemas = st.recursive(leaves, nested, max_leaves=5).map(lambda schema: {**schema, "$defs": DEFINITIONS})


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Draft 2020-12, as far as it is used here, read afresh."""
    if "$ref" in schema:
        return valid(value, DEFINITIONS[schema["$ref"].rsplit("/")[-1]])
    if "const" in schema:
        return same(value, schema["const"])
    if "enum" in schema:
        return any(same(value, other) for other in schema["enum"])
    if "anyOf" in schema:
        return any(valid(value, choice) for choice in schema["anyOf"])
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "string": isinstance(value, str),
        "integer": number and value == int(value),
        "number": number,
        "boolean": isinstance(value, bool),
        "null": value is None,
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    if not any(fits[kind] for kind in kinds):
        return False
    least, most = float("-inf"), float("inf")
    if isinstance(value, str):
        fine = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", most)
        return fine and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, list):
        fine = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", most)
        return fine and all(valid(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        known = schema["properties"]
        return set(schema["required"]) <= value.keys() and all(
            valid(v, known[k]) for k, v in value.items() if k in known
        )
    if number:
        above = value > schema.get("exclusiveMinimum", least)
        return above and schema.get("minimum", least) <= value <= schema.get("maximum", most)
    return True


def same(left: Any, right: Any) -> bool:
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


@given(schemas, st.integers(0, 99))
def test_what_is_written_is_json_and_valid(schema: dict[str, Any], seed: int) -> None:
    constraint = JsonSchema(schema, toy())
    for n in range(3):
        text = text_of(walk(constraint, random.Random(3 * seed + n), steps=20 * n))
        value = json.loads(text)
        assert valid(value, schema), (schema, text)
        text.encode()
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # whole characters, finite numbers


@given(schemas, values, st.integers(0, 99))
def test_valid_values_can_be_written(schema: dict[str, Any], value: Any, seed: int) -> None:
    """Those that were written once are accepted in both ways of `json.dumps`, compact and with spaces."""
    constraint = JsonSchema({"anyOf": [{"const": value}, schema], "$defs": DEFINITIONS}, toy())
    drawn = json.loads(text_of(walk(JsonSchema(schema, toy()), random.Random(seed), steps=10)))
    numbers = re.search(r"\d[.e]", json.dumps(drawn))  # Python would write them another way
    for one in (value,) if numbers else (value, drawn):
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(one, ensure_ascii=False, separators=separators)
            assert constraint.accepts(spelt(text)), text
    assert not constraint.accepts(spelt(json.dumps(value) + " "))


@given(st.integers(-2000, 2000), st.integers(0, 3000), st.lists(st.integers(-5000, 5000), max_size=8))
def test_integers_of_a_range(low: int, width: int, some: list[int]) -> None:
    constraint = JsonSchema({"type": "integer", "minimum": low, "maximum": low + width}, toy())
    for n in (*some, low - 1, low, low + width, low + width + 1, 0, -low):
        assert constraint.accepts(spelt(str(n))) == (low <= n <= low + width)
    for wrong in (f"0{low + width}", f"+{low}", "-0", "", f"{low}.0"):
        assert not constraint.accepts(spelt(wrong))


def test_strings_and_numbers_as_json_has_them() -> None:
    string, number = (JsonSchema({"type": kind}, toy()) for kind in ("string", "number"))
    for text in ['""', '"한 😀"', r'"\n\"\\\/\u00e9"', r'"\ud83d\ude00"', '"\x7f"']:
        assert string.accepts(spelt(text))
        json.loads(text)
    for text in ['"', '"\n"', r'"\x"', r'"\u12"', r'"\ud83d"', r'"\ude00"', r'"\ud83da"', "'a'", "a", '"a"b']:
        assert not string.accepts(spelt(text))
    assert not string.accepts([ord('"'), 0xED, 0xA0, 0x80, ord('"')])  # a surrogate, which is no UTF-8
    for text in ["0", "-0.5", "10", "1e5", "1.25E-07", "999999999999999"]:
        assert number.accepts(spelt(text))
    for text in ["01", "-", "1.", ".5", "+1", "1e", "1e999", "NaN", "Infinity", "--1", "1 "]:
        assert not number.accepts(spelt(text))


@pytest.mark.parametrize(
    ("least", "most"), [(0, 0), (0, 2), (1, 1), (1, 3), (2, 2), (2, 4), (0, None), (1, None), (3, None)]
)
def test_lengths(least: int, most: int | None) -> None:
    def span(low: str, high: str) -> dict[str, int]:
        return {low: least} | ({} if most is None else {high: most})

    array = JsonSchema({"type": "array", "items": {"type": "null"}, **span("minItems", "maxItems")}, toy())
    string = JsonSchema({"type": "string", **span("minLength", "maxLength")}, toy())
    for n in range(7):
        fits = least <= n and (most is None or n <= most)
        assert array.accepts(spelt(json.dumps([None] * n))) == fits
        for c in ("a", "한", "😀", r"\n", r"\ud83d\ude00"):  # each of them one character
            assert string.accepts(spelt(f'"{c * n}"')) == fits


def test_the_order_of_properties() -> None:
    def has(names: str) -> bool:
        return constraint.accepts(spelt(json.dumps(dict.fromkeys(names))))

    null = {"type": "null"}
    schema = {"type": "object", "properties": dict.fromkeys("abcd", null), "required": ["b", "d"]}
    constraint = JsonSchema(schema, toy())
    assert [names for n in range(5) for names in itertools.permutations("abcd", n) if has("".join(names))] == [
        tuple("bd"), tuple("abd"), tuple("bcd"), tuple("abcd"),
    ]  # fmt: skip
    constraint = JsonSchema({"type": "object", "properties": dict.fromkeys("abc", null)}, toy())
    for n in range(4):
        for some in itertools.permutations("abc", n):
            assert has("".join(some)) == (list(some) == sorted(some))


def test_many_optional_properties_are_cheap() -> None:
    fields = {f"field{n}": {"type": "string", "maxLength": 20} for n in range(60)}
    constraint = JsonSchema({"type": "object", "properties": fields}, toy())
    text = '{"field0":"a","field59":"b"}'
    assert constraint.accepts(spelt(text))
    assert constraint._automaton.size < 10 * len(text)


def test_definitions_within_themselves() -> None:
    """However deeply, also through each other."""
    constraint = JsonSchema({"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"}, toy())
    value: dict[str, Any] = {"v": 0}
    for _ in range(20):
        assert constraint.accepts(spelt(json.dumps(value)))
        assert not constraint.accepts(spelt(json.dumps(value)[:-1]))
        value = {"v": 0, "next": value}
    lists = {
        "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
        "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 0}]},
    }
    constraint = JsonSchema({"$defs": lists, "$ref": "#/$defs/b"}, toy())
    for depth in range(20):
        assert constraint.accepts(spelt("[" * depth + "0" + "]" * depth))
        assert not constraint.accepts(spelt("[" * depth + "1" + "]" * depth))


json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
)


@given(json_values)
def test_any_value(value: Any) -> None:
    """A schema that says nothing allows all JSON; free names of objects have values of one schema."""
    text = json.dumps(value, ensure_ascii=False)
    assert JsonSchema({}, toy()).accepts(spelt(text))
    assert JsonSchema({"type": "object", "additionalProperties": {}}, toy()).accepts(spelt(text)) == isinstance(
        value, dict
    )
    integers = JsonSchema({"type": "object", "additionalProperties": {"type": "integer"}}, toy())
    whole = isinstance(value, dict) and all(type(held) is int for held in value.values())
    assert integers.accepts(spelt(text)) == whole


def test_schemas_that_pydantic_writes() -> None:
    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: int = Field(9, ge=0, le=9)

    class Dog(BaseModel):
        kind: Literal["dog"]
        name: str | None = None
        friends: list["Cat | Dog"] = Field([], max_length=2)

    class Home(BaseModel):
        """Where they live."""

        pets: list[Cat | Dog]
        best: Cat | Dog = Field(discriminator="kind")
        size: Literal["small", "large"] = "small"

    constraint = JsonSchema(Home.model_json_schema(), toy())
    for seed in range(10):
        Home.model_validate_json(text_of(walk(constraint, random.Random(seed))))
    home = {
        "pets": [],
        "best": {"kind": "dog", "name": "한", "friends": [{"kind": "cat", "lives": 9}]},
        "size": "small",
    }
    assert constraint.accepts(spelt(json.dumps(home, ensure_ascii=False)))


TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}, "v": {"type": "null"}}, "required": ["kind"]}
    for kind in ("a", "b")
]


@pytest.mark.parametrize(
    ("choices", "fine"),
    [
        ([{"type": "string"}, {"type": "null"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": "a"}, {"enum": ["b", 1]}], True),
        ([{"const": "a"}, {"enum": ["a", 1]}], False),
        ([{"const": "a"}, {"type": "integer"}], True),
        ([{"const": "a"}, {"type": "string"}], False),
        (TAGGED, True),
        ([TAGGED[0], TAGGED[0]], False),
        ([{**TAGGED[0], "required": []}, TAGGED[1]], False),
        ([{"$ref": "#/$defs/tree"}, {"type": "array", "items": {"type": "null"}}], True),
        ([{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}], False),
    ],
)
def test_exactly_one(choices: list[Any], fine: bool) -> None:
    schema = {"oneOf": choices, "$defs": DEFINITIONS}
    if fine:
        JsonSchema(schema, toy())
    else:
        with refused(r"^schema.oneOf: 0 and 1 may both match: distinguish them by type or const, or use anyOf$"):
            JsonSchema(schema, toy())


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "text"}, "^schema.type = 'text': must be of object, array, string"),
        ({"type": "string", "format": "date"}, "^schema.format: is not supported for string$"),
        ({"type": "number", "minimum": 0}, "^schema.minimum: is not supported for number$"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "^schema.type: is not supported with anyOf$"),
        ({"const": 1, "enum": [1]}, "^schema: has const and enum"),
        ({"const": float("nan")}, "^schema.const: holds nan, which JSON cannot write$"),
        ({"enum": []}, "^schema.enum: holds no value$"),
        ({"enum": ["a"], "type": "integer"}, "^schema.enum: holds no value of type integer$"),
        ({"type": "array"}, "^schema: needs items"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1}, "minItems = 2 above maxItems = 1"),
        ({"type": "array", "items": {"type": "array"}}, "^schema.items: needs items"),
        ({"type": "string", "minLength": -1}, "^schema.minLength = -1: must be an integer from 0 on$"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "^schema.pattern: excludes minLength and maxLength"),
        ({"type": "string", "pattern": "a(?=b)"}, r"^schema.pattern: the pattern a\(\?=b\), character 4: .*lookaround"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "^schema: has no integer from 3 to 2$"),
        ({"type": "object", "properties": {"a": 3}}, "^schema.properties.a: must be an object, not 3$"),
        ({"type": "object", "required": ["a"]}, "^schema.required: names 'a', which is not among the properties$"),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": {}},
            "^schema.additionalProperties: must be true or false beside properties$",
        ),
        ({"$ref": "#/$defs/a"}, "there is no such definition$"),
        ({"$ref": "http://a/b"}, "must point into this document"),
        ({"$ref": "#"}, "^the schema is impossible: no text matches it$"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "^the schema is impossible: no text matches it$",
        ),
    ],
)
def test_schemas_that_are_refused(schema: dict[str, Any], message: str) -> None:
    with refused(message) as caught:
        JsonSchema(schema, toy())
    assert len(str(caught.value).splitlines()) == 1
