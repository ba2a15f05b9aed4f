"""llguidance allows the tokens that the walk over the vocabulary allows; near the end of a budget, those in time."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from anyformer.generation.constraints import token_masks
from anyformer.generation.constraints.automaton import BROKEN
from anyformer.generation.constraints.constraint import within_budget
from anyformer.generation.constraints.text_constraint import JsonSchema, Regex, TreeConstraint
from tests.decoding.test_json_schema import schemas
from tests.decoding.test_patterns import patterns
from tests.decoding.toy_tokens import TOKENS, after, spelt, toy

pytest.importorskip("llguidance")

LONGER = [TOKENS.index(b"ab"), TOKENS.index(b"aba")]


def check(constraint: TreeConstraint, seed: int) -> None:
    """Along a random answer: the same tokens, and in each budget exactly those that reach an end in time."""
    chance, state = random.Random(seed), constraint.start()
    assert constraint._fast is not None
    for _ in range(10):
        walk = torch.from_numpy(constraint._walks[state]).long()
        assert constraint._fast.mask(state) is not None
        assert torch.equal(constraint.allowed(torch.tensor([state]))[0], walk != BROKEN)
        needed = torch.from_numpy(constraint._distances())[walk]
        nearest = int(constraint._distances()[state])
        for left in (nearest + more for more in (0, 1, 2, 4, 8, 16, 64)):
            (found,) = constraint.allowed_within(torch.tensor([state]), torch.tensor([left]))
            (expected,) = within_budget((walk != BROKEN)[None], needed[None], torch.tensor([left]))
            assert torch.equal(found, expected), (state, left)
        token = chance.choice((walk != BROKEN).nonzero()[:, 0].tolist())
        if token in constraint.stop:
            break
        state = int(constraint.advance(torch.tensor([state]), torch.tensor([token])))


@given(patterns, st.integers(0, 99))
def test_of_patterns(pattern: str, seed: int) -> None:
    check(Regex(pattern, toy()), seed)


@given(schemas, st.integers(0, 99))
@settings(deadline=None)
def test_of_schemas(schema: dict[str, Any], seed: int) -> None:
    check(JsonSchema(schema, toy()), seed)


def test_where_llguidance_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern beyond its limits, and an installation without it: the walk answers."""
    with monkeypatch.context() as patch:
        patch.setattr(token_masks, "FUEL", 1)
        slow = Regex("(ab|cd){2,9}x", toy())
        assert slow._fast is not None
        assert slow._fast.mask(slow.start()) is None
        assert slow.allowed(torch.tensor([slow.start()])).nonzero()[:, 1].tolist() == [*spelt("ac"), *LONGER]
    with monkeypatch.context() as patch:
        patch.setattr(token_masks, "MAX_GRAMMAR", 10)
        assert Regex("(ab|cd){2,9}x", toy())._fast is None
    fast = Regex("ab*|c", toy())
    monkeypatch.setattr(token_masks, "library", lambda: None)
    without = Regex("ab*|c", toy())
    assert without._fast is None
    for tokens in ([], spelt("a"), spelt("ab"), spelt("c")):
        states = [torch.tensor([after(constraint, tokens)]) for constraint in (fast, without)]
        assert torch.equal(fast.allowed(states[0]), without.allowed(states[1]))


def test_old_parsers_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first text that led to a state."""
    monkeypatch.setattr(token_masks, "MAX_PARSERS", 1)
    constraint, states = Regex("[ab]{3}c{1,9}d", toy()), [2]
    for token in spelt("abacc"):
        states.append(int(constraint.advance(torch.tensor(states[-1:]), torch.tensor([token]))))
    for state in random.Random(0).sample(states * 3, 18):
        assert constraint._fast is not None
        found = constraint._fast.mask(state)
        assert found is not None
        assert torch.equal(found, torch.from_numpy(constraint._walks[state] != BROKEN))
        assert len(constraint._fast._parsers) == 1
