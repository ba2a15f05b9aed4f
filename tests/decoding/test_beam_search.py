"""Beam search: by trying all answers out, by scoring them anew, and what every hypothesis must be."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.config import Attention, ConfigError, ModelConfig, Window
from anyformer.generation.beam_search import beam_search
from anyformer.generation.contrastive import contrastive_search
from anyformer.generation.generate import NonFiniteLogits, generate
from anyformer.generation.logit_processors import build as build_processors
from anyformer.generation.strategy import EarlyStopping, Sampling
from tests.decoding.beams import all_answers, answers, log_p, penalties, stopping, stops
from tests.decoding.small_models import BLOCK, STACK, decoder, either, pair
from tests.strategies import VOCAB, build, close, seeds, tokens

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
        for a, b in zip(answers(found, i), answers(alone, 0), strict=True):
            if a != b:  # two answers of one score: either may be the better one by rounding
                close(*(log_p(model, row, [answer]).sum() for answer in (a, b)))


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


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [beam_search, contrastive_search])
def test_nan_names_the_row_and_spares_the_others(search):
    model = decoder(tie="none")
    with torch.no_grad():
        model.target.table.weight[5] = math.nan
    processors = build_processors(Sampling(banned=((5,),)), vocab=VOCAB)
    ids = torch.tensor([[3, 4], [3, 5], [6, 7]])
    with pytest.raises(NonFiniteLogits, match="row 1: the model's logits are not finite") as error:
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
    "scores that overflow": (
        lambda: beam_search(decoder(), IDS, length_penalty=-10.0),
        "length_penalty = -10.0: must be at least -5",
    ),
    "equal groups": (lambda: beam_search(decoder(), IDS, groups=2), "diversity_penalty = 0.0: must be above 0"),
    "one group": (lambda: beam_search(decoder(), IDS, diversity_penalty=0.5), "diversity_penalty = 0.5: needs groups"),
    "no room for phrases": (
        lambda: beam_search(decoder(), IDS, stop=(2,), phrases=[[3, 4], [5, 6]], max_new_tokens=3),
        "phrases: have 4 tokens, more than max_new_tokens = 3",
    ),
    "groups and phrases": (
        lambda: beam_search(decoder(), IDS, stop=(2,), phrases=[[3]], groups=2, diversity_penalty=1.0),
        "phrases: are allocated within one group",
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
