"""Logit processors: by those of `transformers` on each row alone, or by plain loops."""

import pytest
import torch
from hypothesis import assume, given, strategies as st
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import logits_process as theirs

from anyformer.generation.logit_processors import Allowed, build, process
from anyformer.generation.strategy import Sampling
from tests.decoding.logit_cases import END, INF, VOCAB, Case, alone, cases, fractions, ids, option, same, words

# -- by transformers ------------------------------------------------------------------------------------------------


@given(cases(), st.floats(0.2, 5.0))
def test_temperature_and_repetition(case: Case, value: float):
    same(option(temperature=value)(*case[:2]), alone(case, lambda _: theirs.TemperatureLogitsWarper(value)))
    same(
        option(repetition_penalty=value)(*case[:2]),
        alone(case, lambda _: theirs.RepetitionPenaltyLogitsProcessor(value)),
    )


@given(cases(), st.integers(1, VOCAB + 2), fractions)
def test_top_k_min_p_typical(case: Case, k: int, p: float):
    same(option(top_k=k)(*case[:2]), alone(case, lambda _: theirs.TopKLogitsWarper(k)))
    same(option(min_p=p)(*case[:2]), alone(case, lambda _: theirs.MinPLogitsWarper(p)))
    same(option(typical_p=p)(*case[:2]), alone(case, lambda _: theirs.TypicalLogitsWarper(p)))


@given(cases(), fractions)
def test_top_p(case: Case, p: float):
    """The same but for ties, of which it keeps all or none."""
    ours, other = option(top_p=p)(*case[:2]), alone(case, lambda _: theirs.TopPLogitsWarper(p))
    last = torch.where(other > -INF, other, INF).amin(dim=-1, keepdim=True)
    same(ours, torch.where(case.logits >= last, case.logits, -INF))


@given(cases(ties=False), fractions)
def test_top_p_without_ties(case: Case, p: float):
    same(option(top_p=p)(*case[:2]), alone(case, lambda _: theirs.TopPLogitsWarper(p)))


@given(cases(), st.integers(1, 4))
def test_no_repeat(case: Case, size: int):
    same(option(no_repeat_ngram=size)(*case[:2]), alone(case, lambda _: theirs.NoRepeatNGramLogitsProcessor(size)))


@given(cases(), words)
def test_banned(case: Case, words: list[tuple[int, ...]]):
    words = [*words, *((*row[-2:], 0) for row in case.rows)]  # some that apply
    lists = [list(word) for word in words]
    same(option(banned=tuple(words))(*case[:2]), alone(case, lambda _: theirs.NoBadWordsLogitsProcessor(lists)))


@given(cases(), st.integers(0, 6), st.lists(ids, min_size=1, max_size=3))
def test_minimum(case: Case, count: int, stop: list[int]):
    def their(i: int) -> theirs.LogitsProcessor:
        return theirs.MinNewTokensLengthLogitsProcessor(case.prompts[i], count, stop)

    same(option(stop, min_new_tokens=count)(*case[:2]), alone(case, their))


@given(cases(), st.integers(0, 2**32))
def test_allowed(case: Case, seed: int):
    """Also where all that is allowed had been banned before: it holds."""
    allowed = torch.rand(len(case.rows), VOCAB, generator=torch.Generator().manual_seed(seed)) < 0.4
    assume(allowed.any(dim=-1).all())
    lists = [row.nonzero().flatten().tolist() for row in allowed]
    same(
        Allowed(lambda _: allowed)(*case[:2]),
        alone(case, lambda i: theirs.PrefixConstrainedLogitsProcessor(lambda *_: lists[i], num_beams=1)),
    )


@given(cases(least=1), ids)
def test_prefix_of_one(case: Case, first: int):
    """There only for answers to a start id, which is the whole prompt; else it is `transformers` that does nothing."""
    new = torch.arange(case.history.ids.shape[1]) > case.history.present.int().argmax(dim=1)[:, None]
    history = case.history._replace(new=new)
    same(
        option(prefix=(first,))(history, case.logits),
        alone(case, lambda _: theirs.ForcedBOSTokenLogitsProcessor(first)),
    )


class Anything(GenerationMixin):
    """As much of a model as it takes to be asked for its processors."""

    config = type("Config", (), {"is_encoder_decoder": False})


@st.composite
def ways(draw: st.DrawFn) -> Sampling:
    def maybe(strategy: st.SearchStrategy) -> object:
        return draw(st.none() | strategy)

    return Sampling(
        temperature=draw(st.sampled_from([0.4, 1.0, 2.5])),
        top_k=maybe(st.integers(1, VOCAB)),
        top_p=maybe(st.sampled_from([0.3, 0.8, 1.0])),
        min_p=maybe(st.sampled_from([0.05, 0.4, 1.0])),
        typical_p=maybe(st.sampled_from([0.3, 0.8, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.7])),
        no_repeat_ngram=maybe(st.integers(1, 3)),
        banned=draw(st.just(()) | words.filter(lambda words: (END,) not in words)),  # there, ends are not words
        min_new_tokens=draw(st.integers(0, 4)),
    )


@pytest.mark.filterwarnings("ignore:Passing `")  # that an empty prompt has nothing to repeat
@given(cases(ties=False), ways(), st.booleans())
def test_the_order_of_all(case: Case, how: Sampling, constrained: bool):
    """What `generate` of `transformers` would make of the same options. Left out are rows that it empties on the
    way, from where it counts with NaN, and those in which a constraint overrules bans, which makes ties for top-p."""
    allowed = torch.arange(VOCAB).expand_as(case.logits) % 2 == 0
    given = {"top_k": 0, **how.given}
    banned, size = given.pop("banned", ()), given.pop("no_repeat_ngram", 0)
    config = GenerationConfig(
        **given, temperature=how.temperature, no_repeat_ngram_size=size, do_sample=True, num_beams=1
    )
    config.bad_words_ids = [list(word) for word in banned] or None
    config._eos_token_tensor = torch.tensor([END])
    made = build(how, vocab=VOCAB, stop=(END,), allowed=(lambda _: allowed) if constrained else None)
    ours = process(made, case.history, case.logits)
    for i, row in enumerate(case.rows):
        their = Anything()._get_logits_processor(
            config,
            input_ids_seq_length=case.prompts[i],
            encoder_input_ids=torch.tensor([row], dtype=torch.long),
            prefix_allowed_tokens_fn=(lambda *_: allowed[0].nonzero().flatten().tolist()) if constrained else None,
            device="cpu",
            model_kwargs={},
        )
        logits, apart = case.logits[i : i + 1].clone(), False
        for step in their:
            logits = step(torch.tensor([row], dtype=torch.long), logits)
            possible = logits[logits > -INF]
            apart = apart or not len(possible) or len(possible.unique()) < len(possible)
        if not apart:
            same(ours[i], logits[0])
        assert len(their) == len(made)


# -- by plain loops -------------------------------------------------------------------------------------------------


@given(cases(), st.floats(-2, 2))
def test_presence_and_frequency(case: Case, penalty: float):
    """OpenAI's: of the answer alone."""
    presence, frequency = case.logits.clone(), case.logits.clone()
    for i, (row, prompt) in enumerate(zip(case.rows, case.prompts, strict=True)):
        for token in set(row[prompt:]):
            presence[i, token] -= penalty
            frequency[i, token] -= penalty * row[prompt:].count(token)
    torch.testing.assert_close(option(presence_penalty=penalty)(*case[:2]), presence)
    torch.testing.assert_close(option(frequency_penalty=penalty)(*case[:2]), frequency)


@given(cases(), st.dictionaries(ids, st.integers(-100, 100).map(float), min_size=1))
def test_bias(case: Case, biases: dict[int, float]):
    expected = case.logits.clone()
    for id, value in biases.items():
        expected[:, id] += value
    torch.testing.assert_close(option(bias=tuple(biases.items()))(*case[:2]), expected, equal_nan=True)


@given(cases(), st.lists(ids, min_size=1, max_size=5))
def test_prefix(case: Case, prefix: list[int]):
    expected = case.logits.clone()
    for i, (row, prompt) in enumerate(zip(case.rows, case.prompts, strict=True)):
        if len(row) - prompt < len(prefix):
            expected[i] = -INF
            expected[i, prefix[len(row) - prompt]] = 0
    same(option(prefix=tuple(prefix))(*case[:2]), expected)
