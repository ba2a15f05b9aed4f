"""Constraints in every loop on ids; how they hurry; strings that are avoided; phrases written in several ways."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from anyformer.config import ConfigError, Learned
from anyformer.generation.beam_search import beam_search
from anyformer.generation.constraints.banned import WithoutStrings
from anyformer.generation.constraints.constraint import Constraint, Trie
from anyformer.generation.constraints.phrases import Phrases, Spellings
from anyformer.generation.constraints.text_constraint import Regex
from anyformer.generation.contrastive import contrastive_search
from anyformer.generation.generate import generate, stream
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import Lookup
from anyformer.nn.model import Transformer
from tests.decoding.beams import answers
from tests.decoding.small_models import decoder, pair
from tests.decoding.toy_tokens import STOP, TOKENS, text_of, toy
from tests.strategies import VOCAB, tokens

# -- in time ----------------------------------------------------------------------------------------------------------


def hurried(constraint: Constraint, chance: random.Random, left: int) -> list[int]:
    """A random answer of at most so many tokens."""
    said: list[int] = []
    state = torch.tensor([constraint.start()])
    for n in range(left, 0, -1):
        mask = constraint.allowed_within(state, torch.tensor([n]))
        assert bool((constraint.allowed(state) | ~mask).all())
        token = chance.choice(mask[0].nonzero()[:, 0].tolist())
        if token in constraint.stop:
            break
        said.append(token)
        state = constraint.advance(state, torch.tensor([token]))
    return said


@given(st.lists(st.lists(st.integers(1, 4), max_size=5), min_size=1, max_size=6), st.randoms(), st.integers(0, 7))
def test_a_choice_is_whole_in_time(sequences: list[list[int]], chance: random.Random, left: int) -> None:
    trie = Trie(sequences, vocab=5, stop=[0])
    said = hurried(trie, chance, left)
    assert trie.accepts(said) == (left >= min(map(len, sequences)))
    if trie.accepts(said):
        assert said in sequences


PATTERNS = {"a*b": 1, "(ab|한국)+": 2, "[a-c]{3,9}": 3, "(x|yz{2,}w)?": 0, '\\{("a": (true|null))?\\}': 2}


@pytest.mark.parametrize("pattern", PATTERNS)
@given(chance=st.randoms(), more=st.integers(0, 5))
@settings(max_examples=20)
def test_a_text_is_whole_in_time(pattern: str, chance: random.Random, more: int) -> None:
    """Where there is room for as many tokens as the shortest text has bytes."""
    constraint = Regex(pattern, toy())
    said = hurried(constraint, chance, PATTERNS[pattern] + more)
    assert constraint.accepts(said), text_of(said)


def test_with_too_little_room_the_end_comes_as_near_as_it_can() -> None:
    constraint = Regex("true|a{9}", toy())
    assert text_of(hurried(constraint, random.Random(0), 1)) == "true"


# -- strings that are avoided -----------------------------------------------------------------------------------------

words = st.lists(st.text("ab한", min_size=1, max_size=4), min_size=1, max_size=4)


@given(words, st.lists(st.sampled_from([97, 98, 256, 257, *("한".encode()), STOP - 3]), max_size=9))
def test_what_is_avoided(strings: list[str], said: list[int]) -> None:
    """A token is allowed exactly if no string stands in the bytes up to its end."""
    constraint, spelt = WithoutStrings(strings, toy()), b""
    state = torch.tensor([constraint.start()])
    for token in said:
        spelt += TOKENS[token]
        good = not any(string.encode() in spelt for string in strings)
        assert bool(constraint.allowed(state)[0, token]) == good
        if not good:
            break
        state = constraint.advance(state, torch.tensor([token]))
        assert bool(constraint.allowed(state)[0, STOP])


def test_nothing_to_avoid() -> None:
    with pytest.raises(ConfigError, match=r"banned\.1: an empty string occurs everywhere"):
        WithoutStrings(["a", ""], toy())


# -- in every loop ----------------------------------------------------------------------------------------------------

LOOPS: dict[str, Callable[..., list[list[int]]]] = {
    "greedy": lambda model, ids, **how: generate(model, ids, **how).tolist(),
    "drawn": lambda model, ids, **how: generate(model, ids, temperature=2.0, seed=1, **how).tolist(),
    "beam": lambda model, ids, **how: beam_search(model, ids, beams=2, **how).ids[:, 0].tolist(),
    "contrastive": lambda model, ids, **how: contrastive_search(model, ids, candidates=2, **how).tolist(),
    "speculative": lambda model, ids, **how: speculate(model, ids, draft=Lookup(), **how).ids.tolist(),
}


@pytest.mark.parametrize("make", [decoder, pair])
@pytest.mark.parametrize("loop", LOOPS)
@given(
    sequences=st.lists(st.lists(st.integers(3, VOCAB - 1), max_size=4), min_size=1, max_size=5), room=st.integers(1, 6)
)
@settings(max_examples=8)
def test_a_constraint_holds(make: Callable[..., Transformer], loop: str, sequences: list[list[int]], room: int) -> None:
    """Beside rows with other rooms, and padded prompts."""
    assume(room >= min(map(len, sequences)))
    model, trie = make(), Trie(sequences, vocab=VOCAB, stop=[2])
    ids, segments = tokens(3, 3, 4), torch.tensor([[0] * 4, [0, 0, -1, -1], [0, 0, 0, -1]])
    rooms = [room, 6, room + 1]
    how = {"segments": segments, "max_new_tokens": rooms, "stop": [2], "constraint": trie}
    for row, most in zip(LOOPS[loop](model, ids, **how), rooms, strict=True):
        said = row[1 if model.encoder else 4 :][:most]
        assert (said[: said.index(2)] if 2 in said else said) in sequences


def test_a_stream_is_held_too() -> None:
    trie = Trie([[3, 4, 5], [6]], vocab=VOCAB, stop=[2])
    how = {"max_new_tokens": 4, "stop": [2], "constraint": trie}
    said = [int(new) for new, _ in stream(decoder(), tokens(0, 1, 3), **how)]
    assert said == generate(decoder(), tokens(0, 1, 3), **how)[0, 3:].tolist()
    assert trie.accepts(said)


def test_a_constraint_on_something_else() -> None:
    trie = Trie([[3]], vocab=VOCAB + 1, stop=[2])
    for search in (generate, beam_search, contrastive_search):
        with pytest.raises(ConfigError, match=f"constraint: is over {VOCAB + 1} ids, and the model has {VOCAB}"):
            search(decoder(), tokens(0, 1, 3), stop=[2], constraint=trie)
        with pytest.raises(ConfigError, match=r"stop = \[3\]: must hold the ids by which the constraint ends"):
            search(decoder(), tokens(0, 1, 3), stop=[3], constraint=Trie([[4]], vocab=VOCAB, stop=[2]))


# -- rooms of their own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [decoder, pair])
@pytest.mark.parametrize("early_stopping", ["first", "heuristic", "never"])
@given(rooms=st.lists(st.integers(1, 6), min_size=3, max_size=3), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_a_search_is_as_if_alone(
    make: Callable[..., Transformer], early_stopping: str, rooms: list[int], seed: int
) -> None:
    model, ids = make(), tokens(seed, 3, 4)
    how = {"beams": 3, "n_best": 3, "stop": [2], "early_stopping": early_stopping}
    found = beam_search(model, ids, max_new_tokens=rooms, **how)
    for row, room in enumerate(rooms):
        alone = beam_search(model, ids[row : row + 1], max_new_tokens=room, **how)
        assert answers(found, row) == answers(alone, 0)
        torch.testing.assert_close(found.scores[row], alone.scores[0])
    spread = contrastive_search(model, ids, max_new_tokens=rooms, candidates=3, stop=[2])
    for row, room in enumerate(rooms):
        alone_ids = contrastive_search(model, ids[row : row + 1], max_new_tokens=room, candidates=3, stop=[2])
        assert spread[row, : alone_ids.shape[1]].tolist() == alone_ids[0].tolist()


def test_a_search_that_is_over_takes_no_position() -> None:
    """Where another row still has room."""
    stack = decoder().config.decoder
    model = decoder(decoder=stack.model_copy(update={"position": Learned(length=6)}))
    ids, segments = tokens(0, 2, 6), torch.tensor([[0] * 6, [0] * 2 + [-1] * 4])
    found = beam_search(model, ids, segments=segments, beams=3, max_new_tokens=[1, 5])
    for row, (length, room) in enumerate([(6, 1), (2, 5)]):
        alone = beam_search(model, ids[row : row + 1, :length], beams=3, max_new_tokens=room)
        assert answers(found, row) == answers(alone, 0)


# -- phrases in several ways ------------------------------------------------------------------------------------------

ways = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)


@given(st.lists(ways, min_size=1, max_size=3), st.lists(st.integers(1, 4), max_size=12))
def test_a_phrase_is_there_in_any_of_its_ways(phrases: list[list[list[int]]], said: list[int]) -> None:
    constraint = Phrases([Spellings(map(tuple, phrase)) for phrase in phrases], vocab=5, stop=[0])
    there = [any(said[at : at + len(way)] == way for way in phrase for at in range(len(said))) for phrase in phrases]
    assert constraint.accepts(said) == all(there)
    state = torch.tensor([constraint.start()])
    for token in said:
        state = constraint.advance(state, torch.tensor([token]))
    assert int(constraint.met(state)) == sum(there)
    assert 0 <= int(constraint.progress(state)) <= constraint.total
    assert (int(constraint.progress(state)) == constraint.total) == all(there)


@given(st.lists(ways, min_size=1, max_size=3), st.randoms())
def test_what_is_wanted_brings_one_of_them_in(phrases: list[list[list[int]]], chance: random.Random) -> None:
    constraint = Phrases([Spellings(map(tuple, phrase)) for phrase in phrases], vocab=5, stop=[0])
    state, steps = torch.tensor([constraint.start()]), 0
    while int(constraint.met(state)) < len(phrases):
        before = int(constraint.progress(state))
        wanted = [token for token in constraint.wanted(state)[0].tolist() if token >= 0]
        ways_on = [constraint.advance(state, torch.tensor([token])) for token in wanted]
        state = max(ways_on, key=lambda after: int(constraint.progress(after)))
        assert int(constraint.progress(state)) > before
        steps += 1
    assert steps <= constraint.total
