"""Regular expressions as constraints: they match what they match in Python."""

import itertools
import random
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.generation.constraints.automaton import MAX_LISTS, utf8
from anyformer.generation.constraints.text_constraint import Regex, Vocabulary
from tests.decoding.toy_tokens import STOP, TOKENS, after, allowed, check_exact, refused, spelt, text_of, toy, walk

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


def test_states_are_made_when_they_are_met() -> None:
    """A counter of millions of states costs only what is visited; patterns that explode cost as little."""
    for pattern in ("[ab]{0,1000}", "(a|b)*a(a|b){40}", "(([ab]{99}){99}){99}", "(){999999}([ab]?){99999}"):
        regex = Regex(pattern, toy())
        for _ in range(2):
            after(regex, spelt("abab"))
        assert regex._automaton.size <= 2 + 2 * 5


def test_a_pattern_that_is_too_ambiguous_has_no_way_on() -> None:
    """Where thousands of parts may continue a text, it is refused there, and the row can only end, broken."""
    regex = Regex("(((a?){99}b?){99}c?){99}", toy())
    state = after(regex, spelt("a"))
    for _ in range(10_000):
        if allowed(regex, state) == [{STOP}]:
            break
        state = int(regex.advance(torch.tensor([state]), torch.tensor([ord("a")])))
    assert len(regex._automaton._sets[state]) <= MAX_LISTS
    assert regex._automaton.size < 10_000


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
        ("a**", "repeats a repetition"),
        ("a++", "repeats a repetition"),
        ("(a", r"character 1: a \( without its \)"),
        ("a)", r"character 2: a \) without its \("),
        ("[a", r"a \[ without its \]"),
        ("[b-a]", "a range must not descend"),
        (r"[a-\d]", "from one character to another"),
        ("a{2,1}", "the minimum exceeds the maximum"),
        ("a{x}", r"\{ must begin"),
        ("{", r"\{ has nothing to repeat"),
        (r"\x4", "2 hexadecimal digits"),
        ("a\\", "ends in a backslash"),
        ("\ud800", "half a character"),
        ("(" * 5000, "nested too deeply"),
        (r"[^\d\D]", "is impossible: no text matches it"),
    ],
)
def test_patterns_that_are_refused(pattern: str, message: str) -> None:
    with refused(message) as caught:
        Regex(pattern, toy())
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 250
