"""Constraints: what they allow is what can still be completed, no more and no less; what they accept is right."""

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import BaseModel, Field

from anyformer.config import ConfigError
from anyformer.decoding.automaton import BROKEN, ENDED, utf8
from anyformer.decoding.constrain import Constraint, JsonSchema, Regex, Trie, Vocabulary
from anyformer.decoding.phrases import Phrases

# Single bytes, some longer tokens, parts of characters, and two ids that are no text.
LONGER = [
    "ab",
    "aba",
    "12",
    '":',
    '{"',
    '"}',
    '",',
    "true",
    "null",
    "fal",
    "se",
    ", ",
    "한국",
    "\\u",
    "]}",
    '"a"',
    "0,",
]
TOKENS = (
    [bytes([n]) for n in range(256)] + [text.encode() for text in LONGER] + ["한".encode()[:2], b"\x80\x80", b"", b""]
)
STOP = len(TOKENS) - 1
SILENT = STOP - 1


@cache
def toy() -> Vocabulary:
    return Vocabulary(TOKENS, stop=[STOP])


def spelt(text: str) -> list[int]:
    return list(text.encode())  # the first ids are the bytes


def allowed(constraint: Constraint, *states: int) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in constraint.allowed(torch.tensor(states))]


def after(constraint: Constraint, tokens: Sequence[int]) -> int:
    states = torch.tensor([constraint.start()])
    for token in tokens:
        states = constraint.advance(states, torch.tensor([token]))
    return int(states)


def check_exact(constraint: Constraint, answers: set[tuple[int, ...]]) -> None:
    """At every prefix of every answer, exactly the tokens that go on to another; the stop id exactly at an end."""
    stop = constraint.stop[0]
    for answer in answers:
        for end in range(len(answer) + 1):
            begun = answer[:end]
            possible = {other[end] for other in answers if other[:end] == begun and len(other) > end}
            state = after(constraint, begun)
            assert allowed(constraint, state) == [possible | ({stop} if begun in answers else set())]
            assert bool(constraint.accepting(torch.tensor([state]))) == (begun in answers)


def walk(constraint: Constraint, chance: random.Random, steps: int = 40) -> list[int]:
    """A random answer of some steps or fewer, and from there on the shortest way to an end."""
    tokens: list[int] = []
    state = constraint.start()
    for _ in range(steps):
        (ways,) = allowed(constraint, state)
        assert ways, "a dead end"
        token = chance.choice(sorted(ways))
        state = int(constraint.advance(torch.tensor([state]), torch.tensor([token])))
        if token in constraint.stop:
            assert state == ENDED
            return tokens
        tokens.append(token)
    return tokens + shortest(constraint, state)


def shortest(constraint: Constraint, start: int) -> list[int]:
    """The fewest tokens that complete an answer."""
    came: dict[int, tuple[int, int]] = {}  # each state that is reached: from where, by which token
    everything = torch.arange(constraint.vocab)
    front = [start]
    while ENDED not in came:
        assert front, "no end"
        reached = []
        for state in front:
            following = constraint.advance(torch.full_like(everything, state), everything).tolist()
            for token, to in enumerate(following):
                if to != BROKEN and to != start and to not in came:
                    came[to] = (state, token)
                    reached.append(to)
        front = reached
    tokens, state = [], ENDED
    while state != start:
        state, token = came[state]
        tokens.append(token)
    return tokens[:0:-1]  # less the stop id


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens).decode()


def refused(message: str) -> Any:
    return pytest.raises(ConfigError, match=message)


# -- one of some sequences --------------------------------------------------------------------------------------------

sequences = st.lists(st.integers(1, 5), max_size=5).map(tuple)


@given(st.sets(sequences, min_size=1, max_size=8))
def test_a_trie_allows_its_sequences(answers: set[tuple[int, ...]]) -> None:
    trie = Trie(sorted(answers), vocab=7, stop=[0])
    check_exact(trie, answers)
    for tokens in itertools.product(range(1, 7), repeat=2):
        assert trie.accepts(tokens) == (tokens in answers)


@pytest.mark.parametrize(
    "constraint",
    [
        Trie([[1, 2], [1, 2, 3], [4]], vocab=len(TOKENS), stop=[STOP, 0]),
        Regex("ab*|c", Vocabulary(TOKENS, stop=[STOP, 0])),
        Phrases([[97]], vocab=len(TOKENS), stop=[STOP, 0]),
    ],
    ids=["trie", "regex", "phrases"],
)
def test_every_constraint_keeps_the_rules(constraint: Constraint) -> None:
    """Rows are apart from each other, and rows that are over stay over and allow the stop ids alone."""
    chance = random.Random(0)
    prefixes = [walk(constraint, chance, steps=3)[:n] for n in (0, 1, 2, 3)]
    ends = [after(constraint, [*walk(constraint, chance, steps=3), stop]) for stop in (STOP, 0)]
    assert ends == [ENDED, ENDED]
    assert after(constraint, [STOP]) == after(constraint, [0, 5]) == BROKEN
    states = torch.tensor([*(after(constraint, prefix) for prefix in prefixes), ENDED, BROKEN])
    masks = constraint.allowed(states)
    assert masks.shape == (6, len(TOKENS))
    assert masks.any(dim=1).all()
    assert torch.equal(masks, torch.cat([constraint.allowed(state[None]) for state in states]))
    order = torch.tensor([5, 3, 3, 0])
    assert torch.equal(constraint.allowed(states[order]), masks[order])
    for state in (ENDED, BROKEN):
        assert allowed(constraint, state) == [{STOP, 0}]
        everything = torch.arange(constraint.vocab)
        assert (constraint.advance(torch.full_like(everything, state), everything) == state).all()
    assert constraint.accepting(torch.tensor([ENDED, BROKEN])).tolist() == [True, False]


def test_a_token_that_is_not_allowed_breaks_the_row() -> None:
    for constraint in (Trie([[1, 2]], vocab=len(TOKENS), stop=[STOP]), Regex("ab", toy())):
        (ways,) = allowed(constraint, constraint.start())
        everything = torch.arange(constraint.vocab)
        following = constraint.advance(torch.full_like(everything, constraint.start()), everything)
        assert set((following != BROKEN).nonzero().flatten().tolist()) == ways


# -- regular expressions ----------------------------------------------------------------------------------------------

atoms = st.sampled_from(
    ["a", "b", "ab", "1", "é", "한", "😀", ".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[ab1]", "[^a]", "[a-c가-힣]",
     r"[^\d\s]", r"\.", r"\n", r"\x41", r"\u00e9", "[]a]", "[a-]", r"[\]\-é]", "-", "()", "[😀-😃]", " "]
)  # fmt: skip
counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{,2}", "*?", "+?", "??", "{1,2}?"])


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = inner.map(lambda p: f"(?:{p})") | inner.map(lambda p: f"({p})")
    return (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=2, max_size=3).map("|".join).map(lambda p: f"({p})")
        | st.tuples(group | atoms.filter(lambda a: len(a) == 1), counts).map("".join)
    )


patterns = st.recursive(atoms, grown, max_leaves=5)
texts = st.text("ab1é한😀. \n-]c", max_size=6)


@given(patterns, st.lists(texts, min_size=1, max_size=20), st.integers(0, 99))
def test_patterns_mean_what_they_mean_in_python(pattern: str, some: list[str], seed: int) -> None:
    python, ours = re.compile(pattern, re.ASCII), Regex(pattern, toy())
    for text in some:
        assert ours.accepts(spelt(text)) == bool(python.fullmatch(text)), (pattern, text)
    answer = text_of(walk(ours, random.Random(seed), steps=5))
    assert python.fullmatch(answer), (pattern, answer)
    for end in range(len(answer) + 1):  # and so on, over texts that come close
        assert ours.accepts(spelt(answer[:end])) == bool(python.fullmatch(answer[:end]))


@pytest.mark.parametrize("count", ["*", "+", "?", "{0}", "{2}", "{2,}", "{,2}", "{2,4}", "{2,4}?", "{0,3}", "{1,1}"])
def test_counts(count: str) -> None:
    for pattern in (f"a{count}", f"(a|aa){count}", f"(a?){count}", f"(a*b?){count}"):
        regex = Regex(pattern, toy())
        for text in ("", *("a" * n for n in range(1, 10)), "ab", "aba", "abab", "ababab"):
            assert regex.accepts(spelt(text)) == bool(re.fullmatch(pattern, text)), (pattern, text)


@given(st.data())
def test_ranges_of_characters_are_ranges_of_bytes(data: st.DataObject) -> None:
    points = st.integers(0, 0x10FFFF) | st.sampled_from([0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000])
    low = data.draw(points | points.map(lambda point: point & ~63))
    high = min(0x10FFFF, low + data.draw(st.integers(0, 200) | st.integers(0, 0x10FFFF)))
    spans = list(utf8(low, high))

    def inside(point: int) -> bool:
        code = chr(point).encode()
        return any(
            len(span) == len(code) and all(a <= byte <= b for byte, (a, b) in zip(code, span, strict=True))
            for span in spans
        )

    for point in {*range(low - 1, low + 200), *range(high - 200, high + 2), (low + high) // 2, data.draw(points)}:
        if 0 <= point <= 0x10FFFF and not 0xD800 <= point <= 0xDFFF:
            assert inside(point) == (low <= point <= high)
    for span in spans:  # and all that is in them is UTF-8
        for code in (bytes(a for a, _ in span), bytes(b for _, b in span)):
            assert low <= ord(code.decode()) <= high


@given(
    st.sets(st.text("ab", max_size=4), min_size=1, max_size=6),
    st.sets(st.sampled_from(["a", "b", "ab", "ba", "aab", "bb", "abab"]), min_size=1),
)
def test_tokens_are_allowed_that_lead_to_an_end(accepted: set[str], tokens: set[str]) -> None:
    """Also where the vocabulary cannot write all texts, and in all ways that a text can be cut into tokens."""
    table = [b"", *(token.encode() for token in sorted(tokens))]
    cuts: set[tuple[int, ...]] = set()
    for length in range(5):
        for ids in itertools.product(range(1, len(table)), repeat=length):
            if b"".join(table[i] for i in ids).decode() in accepted:
                cuts.add(ids)
    build: Callable[[], Regex] = lambda: Regex("|".join(accepted), Vocabulary(table, stop=[0]))  # noqa: E731
    if cuts:
        check_exact(build(), cuts)
    else:
        with refused("is impossible: the vocabulary can write no text of it$"):
            build()


def test_characters_may_be_cut_anywhere() -> None:
    regex = Regex("한[가-힣]!", toy())
    part, korean = TOKENS.index("한".encode()[:2]), TOKENS.index("한국".encode())
    assert allowed(regex, regex.start()) == [{0xED, part, korean}]
    assert allowed(regex, after(regex, [part])) == [{"한".encode()[2]}]
    assert allowed(regex, after(regex, [korean])) == [{ord("!")}]
    assert regex.accepts([part, "한".encode()[2], *spelt("글!")])
    assert not regex.accepts(spelt("한글?"))


def test_text_before_the_answer() -> None:
    table = [b"", b" a", b"a", b" b", b" "]
    regex = Regex("a( b)*", Vocabulary(table, stop=[0], lead=" "))
    assert allowed(regex, regex.start()) == [{1, 4}]
    assert regex.accepts([1, 3, 3])
    assert not regex.accepts([2])


def test_rows_are_made_when_states_are_met() -> None:
    """A counter of a thousand states costs the table only what is visited; patterns that explode cost as little."""
    for pattern in ("[ab]{0,1000}", "(a|b)*a(a|b){40}"):
        regex = Regex(pattern, toy())
        for _ in range(2):
            after(regex, spelt("abab"))
        assert regex._made == 2 + 4


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a^", r"character 2: \^ is an anchor: the whole answer is matched"),
        ("a$", r"character 2: \$ is an anchor"),
        (r"\bword", r"character 2: \\b is an anchor"),
        ("(?=a)", r"\(\?=: lookaround"),
        ("(?<!a)b", r"\(\?<: lookaround"),
        ("(?i)a", r"\(\?i: backreferences, flags"),
        (r"(a)\1", r"\\1: backreferences are not supported"),
        (r"\p{L}", r"\\p is not supported"),
        ("*a", r"character 1: \* has nothing to repeat"),
        ("a**", "repeats what is repeated already"),
        ("a++", "repeats what is repeated already"),
        ("(a", r"character 1: a \( without its \)"),
        ("a)", r"character 2: a \) without its \("),
        ("[a", r"a \[ without its \]"),
        ("[b-a]", "a range goes upwards"),
        (r"[a-\d]", "from one character to another"),
        ("a{2,1}", "the least is more than the most"),
        ("a{x}", r"\{ must begin"),
        ("{", r"\{ has nothing to repeat"),
        (r"\x4", "2 hexadecimal digits"),
        ("a\\", "ends in a backslash"),
        ("\ud800", "half a character"),
        ("(" * 5000, "nested too deeply"),
        ("(((a{99}){99}){99}){99}", "too large"),
        ("(){999999}(a?){99999}", "too large"),
        (r"[^\d\D]", "is impossible: no text matches it"),
    ],
)
def test_patterns_that_are_refused(pattern: str, message: str) -> None:
    with refused(message) as caught:
        Regex(pattern, toy())
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 250


# -- JSON -------------------------------------------------------------------------------------------------------------

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
    assert constraint.accepts(spelt('{"field0":"a","field59":"b"}'))
    assert len(constraint._automaton._edges) < 60 * 20 * 60


def test_definitions_within_themselves() -> None:
    tree = {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"}
    for depth in range(4):
        constraint = JsonSchema(tree, toy(), depth=depth)
        value: dict[str, Any] = {"v": 0}
        for levels in range(5):
            assert constraint.accepts(spelt(json.dumps(value))) == (levels <= depth)
            value = {"v": 0, "next": value}


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

    constraint = JsonSchema(Home.model_json_schema(), toy(), depth=1)
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
        with refused(r"^schema.oneOf: 0 and 1 might both hold: tell them apart by type or const, or write anyOf$"):
            JsonSchema(schema, toy())


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({}, "^schema: says nothing of the value: name a type, or one of "),
        ({"type": "text"}, "^schema.type = 'text': must be of object, array, string"),
        ({"type": "string", "format": "date"}, "^schema.format: is not supported for string$"),
        ({"type": "number", "minimum": 0}, "^schema.minimum: is not supported for number$"),
        ({"anyOf": [{"type": "null"}], "type": "null"}, "^schema.type: is not supported beside anyOf$"),
        ({"const": 1, "enum": [1]}, "^schema: has const beside enum"),
        ({"const": float("nan")}, "^schema.const: holds nan, which JSON cannot write$"),
        ({"enum": []}, "^schema.enum: holds no value$"),
        ({"enum": ["a"], "type": "integer"}, "^schema.enum: holds no value of type integer$"),
        ({"type": "array"}, "^schema: needs items"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1}, "minItems = 2 above maxItems = 1"),
        ({"type": "array", "items": {"type": "array"}}, "^schema.items: needs items"),
        ({"type": "string", "minLength": -1}, "^schema.minLength = -1: must be an integer from 0 on$"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "^schema.pattern: stands beside minLength or maxLength"),
        ({"type": "string", "pattern": "a(?=b)"}, r"^schema.pattern: the pattern a\(\?=b\), character 4: .*lookaround"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "^schema: has no integer from 3 to 2$"),
        ({"type": "object", "properties": {"a": 3}}, "^schema.properties.a: must be an object, not 3$"),
        ({"type": "object", "required": ["a"]}, "^schema.required: names 'a', which is not among the properties$"),
        ({"type": "object", "additionalProperties": {}}, "free names are not supported$"),
        ({"$ref": "#/$defs/a"}, "there is nothing of that name$"),
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


def test_impossible_constraints() -> None:
    words = Vocabulary([b"", b" true", b" a"], stop=[0])
    with refused("^the schema is impossible: the vocabulary can write no text of it$"):
        JsonSchema({"type": "boolean"}, words)
    assert JsonSchema({"type": "boolean"}, Vocabulary([b"", b" true", b" a"], stop=[0], lead=" ")).accepts([1])
    with refused("^sequences: is empty"):
        Trie([], vocab=5, stop=[0])
    with refused("^sequences.1: holds id 5; the vocabulary has ids 0 to 4$"):
        Trie([[1], [2, 5]], vocab=5, stop=[0])
    with refused("^sequences.0: holds the stop id 0: an answer ends there and cannot go on$"):
        Trie([[1, 0]], vocab=5, stop=[0])
    with refused("^phrases.0: holds id -1"):
        Phrases([[-1]], vocab=5, stop=[0])
    with refused("^phrases.0: is empty$"):
        Phrases([[]], vocab=5, stop=[0])
    with refused("^phrases: has 0; there must be 1 to 32$"):
        Phrases([], vocab=5, stop=[0])
    for build in (
        lambda stop: Trie([[1]], vocab=5, stop=stop),
        lambda stop: Phrases([[1]], vocab=5, stop=stop),
        lambda stop: Vocabulary([b"a"] * 5, stop=stop),
    ):
        with refused("^stop: must name at least one id"):
            build([])
        with refused("^stop: holds id 5"):
            build([5])


# -- phrases ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), max_size=14),
)
def test_phrases_are_tracked(phrases: list[list[int]], tokens: list[int]) -> None:
    constraint = Phrases(phrases, vocab=5, stop=[0])
    state = torch.tensor([constraint.start()])
    best = 0
    for end in range(len(tokens) + 1):
        said = tokens[:end]
        there = [any(said[i : i + len(phrase)] == phrase for i in range(end)) for phrase in phrases]
        begun = [
            max(n for n in range(len(phrase)) if said[end - n : end] == phrase[:n] and n <= end) for phrase in phrases
        ]
        bank = sum(len(phrase) for phrase, has in zip(phrases, there, strict=True) if has)
        open_ = [n for n, has in zip(begun, there, strict=True) if not has]
        assert int(constraint.met(state)) == sum(there)
        assert int(constraint.progress(state)) == bank + max(open_, default=0) <= constraint.total
        assert constraint.begun(state).tolist() == [[n * (not has) for n, has in zip(begun, there, strict=True)]]
        assert constraint.wanted(state).tolist() == [
            [-1 if has else phrase[n] for phrase, n, has in zip(phrases, begun, there, strict=True)]
        ]
        assert allowed(constraint, int(state)) == [{1, 2, 3, 4} | ({0} if all(there) else set())]
        assert constraint.accepts(said) == all(there)
        best = max(best, bank)
        if end < len(tokens):
            state = constraint.advance(state, torch.tensor(tokens[end : end + 1]))
    assert int(constraint.progress(state)) >= best


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4), st.randoms())
def test_what_is_wanted_brings_the_phrases_in(phrases: list[list[int]], chance: random.Random) -> None:
    constraint = Phrases(phrases, vocab=5, stop=[0])
    state, steps = torch.tensor([constraint.start()]), 0
    while int(constraint.met(state)) < len(phrases):
        (wanted,) = constraint.wanted(state).tolist()
        (begun,) = constraint.begun(state).tolist()
        token = wanted[max((n, chance.random(), i) for i, n in enumerate(begun) if wanted[i] >= 0)[2]]
        before = int(constraint.progress(state))
        state = constraint.advance(state, torch.tensor([token]))
        assert int(constraint.progress(state)) > before
        steps += 1
    assert steps <= constraint.total == sum(map(len, phrases))
    assert int(constraint.progress(state)) == constraint.total
    ended = constraint.advance(state, torch.tensor([0]))
    assert int(constraint.met(ended)) == len(phrases)
    assert int(constraint.progress(ended)) == constraint.total
