"""Constraints allow exactly the tokens that can still be completed: tries, phrases and rules that hold for all."""

import itertools
import random

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.generation.constraints.automaton import BROKEN, ENDED
from anyformer.generation.constraints.constraint import Constraint, Trie
from anyformer.generation.constraints.phrases import Phrases
from anyformer.generation.constraints.text_constraint import JsonSchema, Regex, Vocabulary
from tests.decoding.toy_tokens import STOP, TOKENS, after, allowed, check_exact, refused, toy, walk

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


# -- JSON -------------------------------------------------------------------------------------------------------------


def test_impossible_constraints() -> None:
    words = Vocabulary([b"", b" true", b" a"], stop=[0])
    with refused("^the schema is impossible: the vocabulary can write no text of it$"):
        JsonSchema({"type": "boolean"}, words)
    assert JsonSchema({"type": "boolean"}, Vocabulary([b"", b" true", b" a"], stop=[0], lead=" ")).accepts([1])
    with refused("^sequences: is empty"):
        Trie([], vocab=5, stop=[0])
    with refused("^sequences.1: holds id 5; the vocabulary has ids 0 to 4$"):
        Trie([[1], [2, 5]], vocab=5, stop=[0])
    with refused("^sequences.0: holds the stop id 0: an answer ends there$"):
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
        assert constraint.started(state).tolist() == [[n * (not has) for n, has in zip(begun, there, strict=True)]]
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
        (begun,) = constraint.started(state).tolist()
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
