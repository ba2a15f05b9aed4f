"""Beam search with constraints and with phrases that must appear."""

import math
from collections.abc import Sequence

import torch
from hypothesis import given, strategies as st

from anyformer.config import ModelConfig
from anyformer.generation.beam_search import Search, _allocated, beam_search
from anyformer.generation.constraints.constraint import Trie
from anyformer.generation.constraints.phrases import Phrases
from anyformer.generation.generate import generate
from anyformer.generation.strategy import Beam
from tests.decoding.beams import all_answers, answers, log_p
from tests.decoding.small_models import decoder, either
from tests.strategies import VOCAB, build, close, seeds, tokens


@given(either, seeds, st.integers(1, 3), st.lists(st.lists(st.integers(3, VOCAB - 1), max_size=3), min_size=1))
def test_a_constraint_is_met(config: ModelConfig, seed: int, beams: int, sequences: list[list[int]]):
    """By all hypotheses; and those are all there are, where the beam is wide enough, in the order of their scores."""
    model, ids, stop = build(config, seed), tokens(seed, 2, 3), (2,)
    allowed = {(*sequence, 2) for sequence in sequences}
    trie = Trie(sequences, vocab=VOCAB, stop=stop)
    how = {"max_new_tokens": 4, "stop": stop, "constraint": trie, "early_stopping": "never"}
    narrow = beam_search(model, ids, beams=beams, n_best=beams, **how)
    wide = beam_search(model, ids, beams=len(allowed), n_best=len(allowed), **how)
    for row in range(2):
        assert set(answers(narrow, row)) <= allowed
        assert set(answers(wide, row)) == allowed
        scores = [float(log_p(model, ids[row], [answer]).mean()) for answer in answers(wide, row)]
        close(wide.scores[row], torch.tensor(scores, dtype=wide.scores.dtype))


def test_an_answer_that_is_cut_off_is_none():
    """Of a constraint that wants three tokens and the stop id."""
    trie = Trie([[3, 4, 5]], vocab=VOCAB, stop=(2,))
    how = {"beams": 2, "stop": (2,), "constraint": trie}
    short, enough, whole = (beam_search(decoder(), tokens(0, 2, 3), max_new_tokens=n, **how) for n in (2, 3, 4))
    assert short.lengths.tolist() == [[0], [0]]
    assert short.scores.tolist() == [[-math.inf], [-math.inf]]
    assert [answers(enough, row) for row in range(2)] == [[(3, 4, 5)]] * 2
    assert [answers(whole, row) for row in range(2)] == [[(3, 4, 5, 2)]] * 2


def holds(answer: tuple[int, ...], phrase: Sequence[int]) -> bool:
    return any(answer[i : i + len(phrase)] == tuple(phrase) for i in range(len(answer)))


wanted = st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=3), min_size=1, max_size=3)


@given(either, seeds, st.integers(1, 5), wanted, st.integers(0, 3))
def test_phrases_appear(config: ModelConfig, seed: int, beams: int, phrases: list[list[int]], more: int):
    """In all hypotheses, however narrow the beam and scarce the room; and some answer is always found."""
    model, ids, longest = build(config, seed), tokens(seed, 2, 3), sum(map(len, phrases)) + more
    found = beam_search(model, ids, beams=beams, n_best=beams, max_new_tokens=longest, stop=(2,), phrases=phrases)
    for row in range(2):
        mine = answers(found, row)
        assert mine
        assert len(set(mine)) == len(mine)
        assert all(holds(answer, phrase) for answer in mine for phrase in phrases)
        for answer, score in zip(mine, found.scores[row], strict=False):
            assert 2 not in answer[:-1]
            close(score, log_p(model, ids[row], [answer]).mean())


@given(either, seeds, st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=2))
def test_a_wide_beam_finds_all_answers_with_a_phrase(config: ModelConfig, seed: int, phrase: list[int]):
    model, ids, beams = build(config, seed), tokens(seed, 1, 3), VOCAB**2
    how = {"beams": beams, "n_best": beams, "max_new_tokens": 2, "length_penalty": 0.0}
    found = beam_search(model, ids, stop=(2,), phrases=[phrase], **how)
    expected = {a: s for a, s in all_answers(model, ids[0], 2, (2,), 0.0).items() if holds(a, phrase)}
    mine = answers(found, 0)
    assert set(mine) == set(expected)
    close(found.scores[0, : len(mine)], torch.tensor(sorted(expected.values(), reverse=True), dtype=torch.double))


def test_no_beam_waits_for_longer_than_it_can():
    """All of them end with the phrase, not only the one that began it first."""
    found = beam_search(decoder(), tokens(0, 4, 3), beams=6, n_best=6, max_new_tokens=6, stop=(2,), phrases=[[4, 9, 4]])
    assert (found.lengths > 0).all()


@given(seeds)
def test_banks_share_the_beam(seed: int):
    """Beams that miss 2, 1 and 0 tokens, two of each: so it is afterwards, with the likeliest of them."""
    phrases = Phrases([[4, 9]], vocab=VOCAB, stop=(2,))
    states = torch.full((6,), phrases.start())
    states[2:] = phrases.advance(states[2:], torch.full((4,), 4))
    states[4:] = phrases.advance(states[4:], torch.full((2,), 9))
    scores = torch.randn(1, 6, VOCAB, generator=torch.Generator().manual_seed(seed))
    scores[..., [4, 9]] -= 10  # such is what must be forced
    scores[:, 4:] += 5  # and those that have it all are likelier
    scores[..., 2] = -math.inf
    search = Search(Beam(beams=6), 1, 9, (2,), scores[0])  # a pool of 12 candidates
    found = _allocated(scores, search, phrases, states[None], torch.tensor([9]))
    chosen = found.flat.gather(1, found.kept)[0]
    missing = 2 - phrases.progress(phrases.advance(states[chosen // VOCAB], chosen % VOCAB))
    assert missing.tolist() == [0, 1, 2, 0, 1, 2]
    every = torch.arange(6 * VOCAB)
    bank = 2 - phrases.progress(phrases.advance(states[every // VOCAB], every % VOCAB))
    for least in (0, 2):
        likeliest = scores.flatten().where(bank == least, -math.inf).argmax()
        assert int(chosen[least]) == int(likeliest)


def test_banks_bring_in_what_is_unlikely_early():
    """A phrase of the least likely tokens: the wider beam scores better than one that waits until it must."""
    model, ids = decoder(3), tokens(3, 4, 3)
    unlikely = generate(model, ids[:1], max_new_tokens=1)[0, -1] % 8 + 3
    how = {"max_new_tokens": 8, "stop": (2,), "phrases": [[int(unlikely), 9, 4]], "length_penalty": 0.0}
    narrow, wide = (beam_search(model, ids, beams=beams, **how).scores for beams in (1, 12))
    assert (wide >= narrow - 1e-9).all()
    assert (wide > narrow + 1e-3).any()
