"""Speculative decoding gives the tokens of token-by-token decoding."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from anyformer.attention.cache.kv_cache import Cache
from anyformer.config import ConfigError, Features, Learned, MaskedLM, ModelConfig, Special, Tokens
from anyformer.generation.constraints.constraint import Trie
from anyformer.generation.generate import NonFiniteLogits, generate
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import Draft, Lookup
from anyformer.nn.model import Transformer
from tests.decoding.drafts import MIXED, drafting, kinds, ragged
from tests.decoding.small_models import STACK, decoder, either, pair
from tests.strategies import VOCAB, build, seeds, tokens

drafts = st.sampled_from(["itself", "another", "lookup", "lookup of 1"])


# -- the likeliest tokens -------------------------------------------------------------------------------------------


@given(
    config=either,
    seed=seeds,
    kind=drafts,
    ahead=st.integers(1, 5),
    steps=st.integers(0, 12),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    side=st.sampled_from(["left", "right"]),
    cache=kinds,
)
def test_greedy_is_as_token_by_token(
    config: ModelConfig, seed: int, kind: str, ahead: int, steps: int, lengths: list[int], side: str, cache: str
):
    model = build(config, seed)
    ids, segments = ragged(seed, lengths, side)
    how = {"segments": segments, "max_new_tokens": steps, "cache": cache}
    found = speculate(model, ids, draft=drafting(kind, model, seed), ahead=ahead, **how)
    assert torch.equal(found.ids, generate(model, ids, **how))
    assert (found.accepted <= found.drafted).all()
    assert found.calls <= max(steps, 1)


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.5},
    "n-grams": {"no_repeat_ngram": 2},
    "words": {"banned": ((3,), (4, 5), (2, 6, 7))},
    "minimum": {"min_new_tokens": 6, "stop": (2, 9, 4)},
    "prefix": {"prefix": (3, 1, 4, 1, 5), "repetition_penalty": 2.0},
    "constraint": {
        "constraint": Trie([(3, 1, 4, 1, 5, 9, 2, 6), (3, 1, 5, 5, 1, 4, 7, 7, 7), (8,)], vocab=VOCAB, stop=(0,)),
        "stop": (0,),
    },
}
DRAWN = {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.95, "seed": 5}


@pytest.mark.parametrize(("make", "kind"), [(decoder, "lookup"), (pair, "nearly")])
@pytest.mark.parametrize("how", HOW)
def test_processors_see_the_history_as_it_would_be(make: Callable[..., Transformer], kind: str, how: str):
    """At every guess; so tokens drawn with a look-up are those that `generate` draws, too."""
    model, ids = make(), tokens(3, 3, 6)
    options = {"max_new_tokens": 12, **HOW[how]}
    draws = [{}, DRAWN] if kind == "lookup" else [{}]
    for drawn in draws:
        found = speculate(model, ids, draft=drafting(kind, model), **options, **drawn)
        assert torch.equal(found.ids, generate(model, ids, **options, **drawn))


@pytest.mark.parametrize("make", [decoder, pair])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.5, "seed": 0}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("ahead", [1, 3, 4])
def test_a_model_agrees_with_itself(make: Callable[..., Transformer], how: dict[str, Any], ahead: int):
    """Every guess stays, and each call says one token more than it read guesses."""
    model, steps = make(), 17
    found = speculate(model, tokens(0, 3, 4), draft=Draft(model), ahead=ahead, max_new_tokens=steps, **how)
    assert torch.equal(found.accepted, found.drafted)
    assert found.calls == 1 + math.ceil((steps - 1) / (ahead + 1))
    assert (found.drafted == steps - found.calls).all()


@pytest.mark.parametrize(("kind", "cache"), [("nearly", "auto"), ("lookup", "static"), ("nearly", "int8")])
def test_slots_are_used_again(cache: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Rows agree with different numbers of guesses; dropped tokens leave no gaps, so that a small cache is enough."""
    model, ids = decoder(decoder=MIXED), tokens(1, 6, 5)
    sizes, take = [], Cache.take
    monkeypatch.setattr(Cache, "take", lambda self, new: sizes.append(self.slots) or take(self, new))
    how = {"max_new_tokens": 30, "cache": cache}
    found = speculate(model, ids, draft=drafting(kind, model), ahead=3, **how)
    assert set(sizes) == {5 + 30 + 3 + 2}
    assert torch.equal(found.ids, generate(model, ids, **how))
    assert len(set(found.accepted.tolist())) > 1


@pytest.mark.parametrize("kind", ["itself", "another", "lookup"])
def test_nothing_is_read_past_the_last_token(kind: str):
    """Positions may end where token-by-token decoding ends."""
    steps, ids = 9, tokens(0, 2, 3)
    model = decoder(decoder=STACK.model_copy(update={"position": Learned(length=3 + steps - 1)}))
    found = speculate(model, ids, draft=drafting(kind, model), ahead=5, max_new_tokens=steps)
    assert torch.equal(found.ids, generate(model, ids, max_new_tokens=steps))


# -- where rows end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [decoder, pair])
@given(
    kind=st.sampled_from(["itself", "nearly", "lookup"]),
    stop=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3, unique=True),
    rooms=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    filler=st.sampled_from([0, None]),
    seed=seeds,
)
@settings(max_examples=12)
def test_stop_ids_and_lengths(
    make: Callable[..., Transformer], kind: str, stop: list[int], rooms: list[int], filler: int | None, seed: int
):
    """A stop id among the guesses ends a row there, and each row has its own length."""
    model, ids = make(special=Special(pad=filler, start=1)), tokens(seed, 4, 3)
    how = {"stop": stop, "max_new_tokens": rooms}
    found = speculate(model, ids, draft=drafting(kind, model), **how)
    assert torch.equal(found.ids, generate(model, ids, **how))


def test_a_spoilt_row_does_not_spoil_the_others():
    model, ids = decoder(), tokens(0, 3, 4)
    ids[1, 2], ids[::2] = 3, ids[::2].where(ids[::2] != 3, 4)
    with torch.no_grad():
        model.target.table.weight[3] = torch.nan
    told = []
    for call in (generate, lambda *a, **k: speculate(*a, draft=Draft(model), **k), _by_lookup):
        with pytest.raises(NonFiniteLogits, match="row 1: ") as error:
            call(model, ids, max_new_tokens=8, banned=((3,),))
        told.append(error.value)
    assert [error.rows for error in told] == [[1]] * 3
    assert all(torch.equal(error.ids, told[0].ids) for error in told)


def _by_lookup(*args: Any, **how: Any) -> None:
    speculate(*args, draft=Lookup(), **how)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 0}], ids=["greedy", "drawn"])
def test_a_spoilt_draft_spoils_nothing(how: dict[str, Any]):
    """It drafts nothing from there on."""
    model, draft, ids = decoder(), decoder(1), tokens(0, 3, 4)
    with torch.no_grad():
        draft.head.table.fill_(torch.nan)
    found = speculate(model, ids, draft=Draft(draft), max_new_tokens=8, **how)
    assert torch.equal(found.ids, generate(model, ids, max_new_tokens=8, **how))
    assert not found.drafted.any()


# -- manners --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_both_models_are_left_as_they_were(training: bool):
    model, draft = decoder().train(training), decoder(1).train(not training)
    found = speculate(model, tokens(0, 2, 3), draft=Draft(draft), max_new_tokens=4)
    assert model.training is training
    assert draft.training is not training
    assert not found.ids.requires_grad
    same = decoder().train(training)
    speculate(same, tokens(0, 2, 3), draft=Draft(same), max_new_tokens=4)
    assert same.training is training


def heard(**fields: Any) -> Transformer:
    return pair(source=Features(size=4), **fields)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "another vocabulary": (
        lambda: speculate(decoder(), tokens(0, 1, 2), draft=Draft(decoder(target=Tokens(vocab=VOCAB + 2)))),
        f"draft: has a target vocabulary of {VOCAB + 2}: must be {VOCAB} like the model's",
    ),
    "another vocabulary of sources": (
        lambda: speculate(pair(), tokens(0, 1, 2), draft=Draft(pair(source=Tokens(vocab=VOCAB + 2)))),
        f"draft: has a source vocabulary of {VOCAB + 2}: must be {VOCAB} like the model's",
    ),
    "another kind of source": (
        lambda: speculate(pair(), tokens(0, 1, 2), draft=Draft(heard())),
        "draft: has a source of kind 'features': must be 'tokens' like the model's",
    ),
    "another shape": (
        lambda: speculate(decoder(), tokens(0, 1, 2), draft=Draft(pair())),
        "draft: is encoder-decoder: must be decoder-only like the model",
    ),
    "the other shape": (
        lambda: speculate(pair(), tokens(0, 1, 2), draft=Draft(decoder())),
        "draft: is decoder-only: must be encoder-decoder like the model",
    ),
    "a draft without words": (
        lambda: speculate(decoder(), tokens(0, 1, 2), draft=Draft(decoder(head=MaskedLM()))),
        "draft: cannot draft tokens: must be a model with a decoder and an `lm` head",
    ),
    "nothing ahead": (
        lambda: speculate(decoder(), tokens(0, 1, 2), draft=Lookup(), ahead=0),
        "ahead = 0: must be at least 1",
    ),
    "no n-gram": (lambda: Lookup(ngram=0), "ngram = 0"),
    "an option in vain": (
        lambda: speculate(decoder(), tokens(0, 1, 2), draft=Lookup(), top_k=3),
        "needs a temperature above 0",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_clear_line(case: str):
    call, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
