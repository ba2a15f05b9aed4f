"""Toy vocabulary of bytes and longer tokens, and walks through a constraint."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from anyformer.config import ConfigError
from anyformer.generation.constraints.automaton import BROKEN, ENDED
from anyformer.generation.constraints.constraint import Constraint
from anyformer.generation.constraints.text_constraint import Vocabulary

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
