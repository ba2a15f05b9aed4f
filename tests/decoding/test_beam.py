"""Beam and contrastive search: by trying all answers out, by scoring them anew, and what every hypothesis must be."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor
from torch.nn.functional import cosine_similarity

from anyformer.config import (
    LM,
    Attention,
    Block,
    ConfigError,
    ModelConfig,
    Rotary,
    Special,
    Stack,
    Tokens,
    Window,
)
from anyformer.decoding.beam import EarlyStopping, Hypotheses, _allocated, beam_search
from anyformer.decoding.constrain import Trie
from anyformer.decoding.contrastive import contrastive_search
from anyformer.decoding.decode import Spoilt, generate
from anyformer.decoding.phrases import Phrases
from anyformer.decoding.process import Sampling, build as build_processors
from anyformer.nn.model import Transformer
from tests.strategies import HERE, VOCAB, build, close, models, seeds, speaks, tokens

BLOCK = Block(mixer=Attention(heads=2))
READ = Tokens(vocab=VOCAB)
STACK = Stack(depth=2, blocks=(BLOCK,), position=Rotary())
CROSSING = STACK.model_copy(update={"blocks": (BLOCK.model_copy(update={"cross": Attention(heads=2)}),)})
SPECIAL = Special(pad=0, start=1)

either = models(shapes=("decoder", "encoder-decoder")).filter(speaks)  # or all tokens may be equally likely
penalties = st.sampled_from([-0.7, 0.0, 0.6, 1.0, 2.0])
stopping = st.sampled_from(["first", "heuristic", "never"])
stops = st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True)


def decoder(seed: int = 0, **fields: Any) -> Transformer:
    parts = {"width": 8, "target": READ, "decoder": STACK, "head": LM(), "special": SPECIAL}
    return build(ModelConfig(**{**parts, **fields}), seed)


def pair(seed: int = 0) -> Transformer:
    parts = {"width": 8, "source": READ, "target": READ, "encoder": STACK, "decoder": CROSSING, "head": LM()}
    return build(ModelConfig(**parts, special=SPECIAL), seed)


@torch.no_grad()
def log_p(model: Transformer, row: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
    """Of each token of answers of one length to one unpadded row, without a cache: [answers, n]."""
    wanted = torch.tensor(answers)
    rows = row.expand(len(wanted), -1)
    prompt = torch.full((len(wanted), 1), 1) if model.encoder else rows
    target = torch.cat((prompt, wanted), dim=1)
    logits = model(rows, target) if model.encoder else model(target)
    every = logits.log_softmax(dim=-1)[:, prompt.shape[1] - 1 : -1]
    return every.gather(2, wanted[..., None])[..., 0]


def all_answers(model: Transformer, row: Tensor, steps: int, stop: Sequence[int], penalty: float) -> dict:
    """Every answer of at most so many tokens that ends with a stop id or is that long, with its score."""
    tried = list(product(range(VOCAB), repeat=steps))
    scores = {}
    for answer, parts in zip(tried, log_p(model, row, tried), strict=True):
        n = next((i + 1 for i, token in enumerate(answer) if token in stop), steps)
        scores[answer[:n]] = float(parts[:n].sum()) / n**penalty
    return scores


def answers(found: Hypotheses, row: int) -> list[tuple[int, ...]]:
    """Those to one prompt, without padding; what stands before them is of one length for all."""
    prompt = found.ids.shape[2] - int(found.lengths.max())
    return [
        tuple(ids[prompt : prompt + n].tolist())
        for ids, n in zip(found.ids[row], found.lengths[row].tolist(), strict=True)
        if n
    ]


# -- what is found --------------------------------------------------------------------------------------------------


@given(either, seeds, st.integers(1, 5), stops, penalties, st.sampled_from(["first", "heuristic"]))
def test_one_beam_is_greedy(
    config: ModelConfig, seed: int, steps: int, stop: list[int], penalty: float, early_stopping: EarlyStopping
):
    """Where the search ends with its first hypothesis."""
    model, ids = build(config, seed), tokens(seed, 2, 3)
    how = {"beams": 1, "length_penalty": penalty, "early_stopping": early_stopping}
    found = beam_search(model, ids, max_new_tokens=steps, stop=stop, **how)
    assert torch.equal(found.ids[:, 0], generate(model, ids, max_new_tokens=steps, stop=stop))


@given(either, seeds, st.integers(1, 2), stops, penalties, stopping)
def test_a_beam_as_wide_as_all_answers_finds_all_of_them(
    config: ModelConfig, seed: int, steps: int, stop: list[int], penalty: float, early_stopping: EarlyStopping
):
    """In order; and it is wider than the vocabulary, and than there are answers where some end early."""
    model, ids, beams = build(config, seed), tokens(seed, 2, 3), VOCAB**steps
    how = {"length_penalty": penalty, "early_stopping": early_stopping}
    found = beam_search(model, ids, beams=beams, n_best=beams, max_new_tokens=steps, stop=stop, **how)
    for row in range(2):
        expected, mine = all_answers(model, ids[row], steps, stop, penalty), answers(found, row)
        assert len(mine) == len(set(mine)) == len(expected)
        assert (found.scores[row, len(mine) :] == -math.inf).all()
        scores = found.scores[row, : len(mine)]
        close(scores, torch.tensor([expected[answer] for answer in mine], dtype=scores.dtype))
        assert (scores.diff() <= 0).all()


@given(either, seeds, st.integers(2, 5), stops, penalties, stopping)
def test_scores_are_of_the_hypotheses(
    config: ModelConfig, seed: int, beams: int, stop: list[int], penalty: float, early_stopping: EarlyStopping
):
    """Sorted, distinct, ended or as long as may be, and scored as a pass without a cache scores them."""
    model, ids = build(config, seed), tokens(seed, 3, 4)
    how = {"length_penalty": penalty, "early_stopping": early_stopping}
    found = beam_search(model, ids, beams=beams, n_best=beams, max_new_tokens=5, stop=stop, **how)
    assert (found.scores.diff(dim=1) <= 0).all()
    for row in range(3):
        mine = answers(found, row)
        assert len(set(mine)) == beams
        for answer, score in zip(mine, found.scores[row], strict=True):
            assert not set(answer[:-1]) & set(stop)
            assert answer[-1] in stop or len(answer) == 5
            close(score, log_p(model, ids[row], [answer]).sum() / len(answer) ** penalty)


@given(either, seeds, st.lists(st.integers(1, 5), min_size=2, max_size=3), stops, stopping, st.booleans())
def test_a_batch_is_its_rows(
    config: ModelConfig, seed: int, lengths: list[int], stop: list[int], early_stopping: EarlyStopping, left: bool
):
    """Padded on either side with anything, and whenever the others end."""
    model, longest = build(config, seed), max(lengths)
    rows = [tokens(seed + i, length) for i, length in enumerate(lengths)]
    ids, segments = tokens(seed + 99, len(rows), longest), torch.full((len(rows), longest), -1)
    for i, row in enumerate(rows):
        real = slice(longest - len(row), None) if left else slice(len(row))
        ids[i, real], segments[i, real] = row, 0
    how = {"beams": 3, "n_best": 2, "max_new_tokens": 4, "stop": stop, "early_stopping": early_stopping}
    found = beam_search(model, ids, segments=segments, **how)
    for i, row in enumerate(rows):
        alone = beam_search(model, row[None], **how)
        close(found.scores[i], alone.scores[0])
        assert answers(found, i) == answers(alone, 0)


@given(seeds, stops, penalties)
def test_who_waits_longer_finds_no_worse(seed: int, stop: list[int], penalty: float):
    model, ids = decoder(seed), tokens(seed, 3, 2)
    how = {"beams": 3, "n_best": 3, "max_new_tokens": 8, "stop": stop, "length_penalty": penalty}
    first, heuristic, never = (
        beam_search(model, ids, early_stopping=way, **how).scores for way in ("first", "heuristic", "never")
    )
    assert (heuristic >= first).all()
    if penalty > 0:
        assert (never >= heuristic).all()


@pytest.mark.parametrize("cache", ["auto", "static", "int8"])
def test_the_cache_can_be_chosen(cache: str):
    """Beams that change places take what a ring holds with them."""
    local = BLOCK.model_copy(update={"mixer": Attention(heads=2, pattern=Window(before=2, after=0))})
    model, ids = decoder(decoder=STACK.model_copy(update={"blocks": (local, BLOCK)})), tokens(0, 2, 5)
    found = beam_search(model, ids, beams=4, n_best=4, max_new_tokens=9, cache=cache)
    for row in range(2):
        anew = log_p(model, ids[row], answers(found, row)).sum(dim=1) / 9
        close(found.scores[row], anew, 5e-2 if cache == "int8" else 1e-9)


@pytest.mark.parametrize("make", [decoder, pair])
def test_prompts_come_first_and_padding_last(make):
    model, ids = make(), tokens(0, 3, 4)
    found = beam_search(model, ids, beams=4, n_best=4, max_new_tokens=6, stop=(2, 3, 4), early_stopping="first")
    prompt = torch.ones(3, 1, dtype=torch.long) if model.encoder else ids
    start = prompt.shape[1]
    assert torch.equal(found.ids[:, :, :start], prompt[:, None].expand(-1, 4, -1))
    assert len(found.lengths.unique()) > 1
    assert found.ids.shape[2] == start + int(found.lengths.max())
    behind = torch.arange(found.ids.shape[2] - start) >= found.lengths[..., None]
    assert (found.ids[:, :, start:][behind] == 0).all()


# -- diverse --------------------------------------------------------------------------------------------------------


@given(seeds, st.sampled_from([1, 2]), stops)
def test_groups_differ_at_every_step(seed: int, width: int, stop: list[int]):
    """With a penalty that outweighs all else. The first group is a search of its own, and no score knows of it."""
    model, ids = decoder(seed), tokens(seed, 2, 3)
    how = {"max_new_tokens": 4, "stop": stop, "early_stopping": "never", "length_penalty": 0.0}
    found = beam_search(model, ids, beams=3 * width, groups=3, diversity_penalty=1e4, n_best=3 * width, **how)
    alone = beam_search(model, ids, beams=width, n_best=width, **how)
    for row in range(2):
        mine = answers(found, row)
        assert len(set(mine)) == len(mine)
        assert set(answers(alone, row)) <= set(mine)
        if width == 1 and not stop:
            assert all(len(set(step)) == 3 for step in zip(*mine, strict=True))
        for answer, score in zip(mine, found.scores[row], strict=False):
            close(score, log_p(model, ids[row], [answer]).sum())


def test_a_small_penalty_changes_little_and_gives_no_answer_twice():
    model, ids = decoder(), tokens(0, 2, 3)
    found = beam_search(model, ids, beams=4, groups=2, diversity_penalty=1e-9, n_best=4, max_new_tokens=4)
    alone = beam_search(model, ids, beams=2, n_best=2, max_new_tokens=4)
    for row in range(2):
        assert answers(found, row) == answers(alone, row)
        assert found.lengths[row].tolist() == [4, 4, 0, 0]
        assert found.scores[row, 2:].tolist() == [-math.inf] * 2


# -- constrained ----------------------------------------------------------------------------------------------------


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
    found = _allocated(scores, 12, phrases, states[None], torch.tensor([9]), torch.tensor([2]))
    chosen = found.flat.gather(1, found.on)[0]
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


# -- contrastive ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def contrast(model: Transformer, row: Tensor, steps: int, k: int, penalty: float) -> list[int] | None:
    """One unpadded row by the formula, all of it read anew for each candidate; None where two are equally good."""
    target = torch.tensor([[1]]) if model.encoder else row[None]
    prompt = target.shape[1]

    def read(ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model.decode(ids, model.encode(row[None]) if model.encoder else None)
        return model.apply_head(hidden, HERE)[0, -1], hidden[0]

    for _ in range(steps):
        logits, before = read(target)
        worth = {}
        for token in logits.topk(k).indices.tolist():
            tried = torch.cat((target, torch.tensor([[token]])), dim=1)
            alike = cosine_similarity(read(tried)[1][-1:], before, dim=-1).max()
            worth[token] = float((1 - penalty) * logits.softmax(-1)[token] - penalty * alike)
        best, *rest = sorted(worth, key=worth.__getitem__, reverse=True)
        if rest and worth[best] - worth[rest[0]] < 1e-9:
            return None
        target = torch.cat((target, torch.tensor([[best]])), dim=1)
    return target[0, prompt:].tolist()


@given(either, seeds, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4), st.booleans())
def test_contrastive_search_is_its_formula(config: ModelConfig, seed: int, lengths: list[int], k: int, left: bool):
    model, longest = build(config, seed), max(lengths)
    rows = [tokens(seed + i, length) for i, length in enumerate(lengths)]
    ids, segments = tokens(seed + 99, len(rows), longest), torch.full((len(rows), longest), -1)
    for i, row in enumerate(rows):
        real = slice(longest - len(row), None) if left else slice(len(row))
        ids[i, real], segments[i, real] = row, 0
    out = contrastive_search(model, ids, segments=segments, candidates=k, alpha=0.6, max_new_tokens=2)
    for row, mine in zip(rows, out[:, -2:].tolist(), strict=True):
        expected = contrast(model, row, 2, k, 0.6)
        assume(expected is not None)
        assert mine == expected


@given(either, seeds, st.integers(1, 4), stops)
def test_contrastive_search_without_penalty_is_greedy(config: ModelConfig, seed: int, k: int, stop: list[int]):
    model, ids = build(config, seed), tokens(seed, 3, 3)
    how = {"max_new_tokens": 4, "stop": stop}
    out = contrastive_search(model, ids, candidates=k, alpha=0.0, **how)
    assert torch.equal(out, generate(model, ids, **how))


def test_contrastive_search_tries_no_banned_token():
    """Also where fewer are left than it tries."""
    banned = tuple((id,) for id in range(VOCAB) if id not in (4, 7, 9))
    processors = build_processors(Sampling(banned=banned), vocab=VOCAB)
    how = {"candidates": 5, "alpha": 0.9, "max_new_tokens": 9, "processors": processors}
    out = contrastive_search(decoder(), tokens(0, 3, 3), **how)
    assert set(out[:, 3:].flatten().tolist()) <= {4, 7, 9}


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [beam_search, contrastive_search])
def test_nan_names_the_row_and_spares_the_others(search):
    model = decoder(tie="none")
    with torch.no_grad():
        model.target.table.weight[5] = math.nan
    processors = build_processors(Sampling(banned=((5,),)), vocab=VOCAB)
    ids = torch.tensor([[3, 4], [3, 5], [6, 7]])
    with pytest.raises(Spoilt, match="row 1: the model's logits are not finite") as error:
        search(model, ids, processors=processors, max_new_tokens=4)
    alone = search(model, ids[[0, 2]], processors=processors, max_new_tokens=4)
    assert torch.equal(error.value.ids[[0, 2]], alone if isinstance(alone, Tensor) else alone.ids)


IDS = tokens(0, 1, 2)
WRONG = {
    "no beams": (lambda: beam_search(decoder(), IDS, beams=0), "beams = 0: must be at least 1"),
    "no tokens": (lambda: beam_search(decoder(), IDS, max_new_tokens=0), "max_new_tokens = 0: must be at least 1"),
    "too many": (lambda: beam_search(decoder(), IDS, beams=2, n_best=3), "n_best = 3: must be from 1 to"),
    "early stopping": (
        lambda: beam_search(decoder(), IDS, early_stopping="soon"),
        "early_stopping = 'soon': must be 'first'",
    ),
    "uneven groups": (
        lambda: beam_search(decoder(), IDS, beams=4, groups=3, diversity_penalty=1.0),
        "groups = 3: must divide beams = 4",
    ),
    "equal groups": (lambda: beam_search(decoder(), IDS, groups=2), "diversity_penalty = 0.0: must be above 0"),
    "one group": (lambda: beam_search(decoder(), IDS, diversity_penalty=0.5), "diversity_penalty = 0.5: needs groups"),
    "no room for phrases": (
        lambda: beam_search(decoder(), IDS, stop=(2,), phrases=[[3, 4], [5, 6]], max_new_tokens=3),
        "phrases: have 4 tokens: max_new_tokens = 3 has no room for them",
    ),
    "groups and phrases": (
        lambda: beam_search(decoder(), IDS, stop=(2,), phrases=[[3]], groups=2, diversity_penalty=1.0),
        "phrases: share one beam out",
    ),
    "a phrase that ends": (lambda: beam_search(decoder(), IDS, stop=(2,), phrases=[[2]]), "phrases.0: .* stop id 2"),
    "no candidates": (lambda: contrastive_search(decoder(), IDS, candidates=0), "candidates = 0: must be at least 1"),
    "too many candidates": (
        lambda: contrastive_search(decoder(), IDS, candidates=VOCAB + 1),
        f"candidates = {VOCAB + 1}: the vocabulary has {VOCAB}",
    ),
    "a large alpha": (lambda: contrastive_search(decoder(), IDS, alpha=1.5), "alpha = 1.5: must be at most 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_clear_line(case: str):
    call, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
