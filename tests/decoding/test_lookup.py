"""Prompt lookup, and caches and constraints that take drafted tokens back."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.config import ModelConfig, Tokens
from anyformer.generation.constraints.constraint import Constraint
from anyformer.generation.constraints.rollback import ConstraintMask
from anyformer.generation.drafters import LookupDrafter, Proposal
from anyformer.generation.logit_processors import History
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import Lookup
from tests.decoding.drafts import MIXED, kinds
from tests.decoding.small_models import decoder, pair
from tests.strategies import VOCAB, build, close, models, seeds, tokens

# -- looking up -----------------------------------------------------------------------------------------------------


def by_hand(row: list[int], ngram: int, limit: int) -> list[int]:
    """What followed the longest run of newest tokens where it stood last, and on as if that were the text."""
    best, at = 0, -1
    for end in range(len(row) - 1):
        length = 0
        while length < ngram and length <= end and row[end - length] == row[len(row) - 1 - length]:
            length += 1
        if length and length >= best:
            best, at = length, end
    text = list(row)
    for n in range(limit if best else 0):
        text.append(text[at + 1 + n])
    return text[len(row) :]


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=4),
    ngram=st.integers(1, 4),
    limits=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    seed=seeds,
)
def test_what_is_looked_up(rows: list[list[int]], ngram: int, limits: list[int], seed: int):
    """With gaps anywhere, and with or without a text before."""
    longest, generator = max(map(len, rows)) + 2, torch.Generator().manual_seed(seed)
    ids, there = torch.full((len(rows), longest), 1), torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        places = torch.randperm(longest, generator=generator)[: len(row)].sort().values
        ids[i, places], there[i, places] = torch.tensor(row), True
    limit = torch.tensor(limits[: len(rows)])
    for split in (0, 2):
        before, text = (ids[:, :split], there[:, :split]), History(ids[:, split:], there[:, split:], there[:, split:])
        guess: Proposal = LookupDrafter(ngram, *before).propose(text, limit)
        mine = [row[found].tolist() for row, found in zip(guess.ids, guess.present, strict=True)]
        assert mine == [by_hand(row, ngram, n) for row, n in zip(rows, limits, strict=False)]


def test_what_was_read_is_looked_up_in_a_source_too():
    """An answer that copies its source is guessed from it; not so where source and answer have other vocabularies."""
    source = torch.tensor([[7, 3, 9, 4, 8, 2, 5, 6]])
    prefix = tuple(source[0].tolist())
    how = {"draft": Lookup(), "prefix": prefix, "max_new_tokens": 8, "ahead": 7}
    assert speculate(pair(), source, **how).calls == 2
    assert speculate(pair(source=Tokens(vocab=VOCAB + 1)), source, **how).calls == 8


# -- constraints ----------------------------------------------------------------------------------------------------


class Remembering(Constraint):
    """Its state depends on every token before, and what it allows on the state."""

    def start(self) -> int:
        return 5

    def allowed(self, states: Tensor) -> Tensor:
        return (states[:, None] >> torch.arange(self.vocab)) % 2 == 1

    def allowed_within(self, states: Tensor, left: Tensor) -> Tensor:
        return self.allowed(states * 7 + left)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        return (states * 31 + tokens * 17 + 1) % 1021


edits = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=2))  # tokens taken back, and said instead


@given(st.lists(st.tuples(edits, edits), min_size=8, max_size=12))
def test_a_constraint_follows_answers_that_are_taken_back(changes: list[tuple[tuple[int, list[int]], ...]]):
    """Whatever it was asked before, it allows what a walk from the start does; prompts and gaps do not count."""
    constraint, rooms = Remembering(VOCAB, (0,)), torch.tensor([26, 29])
    allowed = ConstraintMask(constraint, rooms.tolist(), rooms.device)
    answers: list[list[int]] = [[0, 1, 0, 1], [1, 1, 0]]
    for change in changes:
        answers = [a[: max(len(a) - back, 0)] + more for a, (back, more) in zip(answers, change, strict=True)]
        width = max(map(len, answers))
        ids = torch.tensor([[7, *answer, *[1] * (width - len(answer)), 1] for answer in answers])
        there = torch.tensor([[True] * (1 + len(a)) + [False] * (width - len(a) + 1) for a in answers])
        states = []
        for answer in answers:
            state = torch.tensor([constraint.start()])
            for token in answer:
                state = constraint.advance(state, torch.tensor([token]))
            states.append(state)
        left = rooms - torch.tensor([len(answer) for answer in answers])
        new = (torch.arange(ids.shape[1]) > 0).expand_as(there)
        assert torch.equal(allowed(History(ids, there, new)), constraint.allowed_within(torch.cat(states), left))


# -- taking back ----------------------------------------------------------------------------------------------------


@given(models(shapes=("decoder",)), seeds, st.lists(st.integers(0, 3), min_size=3, max_size=3), kinds, st.booleans())
def test_forgetting_is_as_if_it_had_not_been_read(
    config: ModelConfig, seed: int, dropped: list[int], kind: str, split: bool
):
    """Each row another number of its newest tokens, again and again, with gaps between them or not."""
    model, length = build(config, seed), 5
    cache = model.new_cache(3, 20, kind=kind, slack=4)
    ids, rest, last = tokens(seed, 3, length), tokens(seed + 1, 3, 3), tokens(seed + 2, 3, 2)
    with torch.no_grad():
        model.decode(ids, cache=cache)
        if split:
            cache.split_rows()
        rows = [row[: length - n] for row, n in zip(ids, dropped, strict=True)]
        for new, back in ((rest, [1, 0, 2]), (last, [0, 0, 0])):
            cache.forget(torch.tensor(dropped))
            assert not split or cache.row_length.tolist() == list(map(len, rows))
            read = model.decode(new, cache=cache)
            rows = [torch.cat((row, more)) for row, more in zip(rows, new, strict=True)]
            for row, found in zip(rows, read, strict=True):
                whole = model.new_cache(1, len(row), kind=kind)
                close(found[None], model.decode(row[None], cache=whole)[:, -new.shape[1] :])
            dropped = back
            rows = [row[: len(row) - n] for row, n in zip(rows, dropped, strict=True)]


def test_more_than_the_slack_is_an_error():
    model = decoder(decoder=MIXED)
    cache = model.new_cache(2, 20, slack=2)
    with torch.no_grad():
        model.decode(tokens(0, 2, 9), cache=cache)
    with pytest.raises(ValueError, match="can remove at most 2 tokens"):
        cache.forget(torch.tensor([1, 3]))
    cache.forget(torch.tensor([1, 2]))
