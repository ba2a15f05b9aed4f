"""Processors of logits: by those of `transformers` on each row alone, or by plain loops; and what holds for all."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import logits_process as theirs

from anyformer.config import ConfigError
from anyformer.decoding.process import (
    Allowed,
    Banned,
    Frequency,
    History,
    MinNew,
    MinP,
    NoRepeat,
    Prefix,
    Presence,
    Processor,
    Repetition,
    Sampling,
    Temperature,
    TopK,
    TopP,
    Typical,
    build,
    process,
)
from anyformer.decoding.sample import sample

VOCAB, END = 7, 6
INF = math.inf


class Case(NamedTuple):
    """A batch, and the same rows as lists of what is really there."""

    history: History
    logits: Tensor
    rows: list[list[int]]
    prompts: list[int]  # how many of a row are prompt


@st.composite
def cases(draw: st.DrawFn, ties: bool = True, least: int = 0) -> Case:
    """Ragged rows with gaps anywhere; few ids, so that they repeat; some logits -inf, but not all of a row."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch, length = draw(st.integers(1, 3)), draw(st.integers(max(least, 1), 9))

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    few = draw(st.sampled_from([1, 2, 3, VOCAB]))
    ids = whole(0, few, batch, length)
    there = whole(0, 3, batch, length) > 0
    there[:, length - least :] = True
    new = torch.arange(length) >= whole(0, length + 1, batch, 1)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    if ties and draw(st.booleans()):
        logits = whole(-2, 3, batch, VOCAB).to(dtype)
    else:
        logits = torch.randn(batch, VOCAB, generator=generator, dtype=dtype) * draw(st.sampled_from([0.5, 3.0, 20.0]))
    if draw(st.booleans()):
        gone = whole(0, 3, batch, VOCAB) == 0
        gone[torch.arange(batch), whole(0, VOCAB, batch)] = False
        logits[gone] = -INF
    rows = [row[real].tolist() for row, real in zip(ids, there, strict=True)]
    prompts = (there & ~new).sum(dim=1).tolist()
    gaps = whole(0, few, batch, length) if draw(st.booleans()) else whole(-100, 100, batch, length)  # anything
    ids = torch.where(there, ids, gaps)
    return Case(History(ids, there, new), logits, rows, prompts)


def alone(case: Case, their: Callable[[int], theirs.LogitsProcessor]) -> Tensor:
    """What `transformers` makes of each row by itself; a row that would be emptied is left as it is."""
    out = []
    for i, (row, logits) in enumerate(zip(case.rows, case.logits.clone(), strict=True)):
        made = their(i)(torch.tensor([row], dtype=torch.long), logits[None])[0]
        out.append(logits if made.isneginf().all() else made)
    return torch.stack(out)


def same(ours: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(ours, other, rtol=0, atol=0)


ids = st.integers(0, VOCAB - 1)
words = st.lists(
    st.lists(st.integers(0, 2) | ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=5, unique=True
)
fractions = st.floats(0.01, 0.99)


# -- by transformers ------------------------------------------------------------------------------------------------


@given(cases(), st.floats(0.2, 5.0))
def test_temperature_and_repetition(case: Case, value: float):
    same(Temperature(value)(*case[:2]), alone(case, lambda _: theirs.TemperatureLogitsWarper(value)))
    same(Repetition(value)(*case[:2]), alone(case, lambda _: theirs.RepetitionPenaltyLogitsProcessor(value)))


@given(cases(), st.integers(1, VOCAB + 2), fractions)
def test_top_k_min_p_typical(case: Case, k: int, p: float):
    same(TopK(k)(*case[:2]), alone(case, lambda _: theirs.TopKLogitsWarper(k)))
    same(MinP(p)(*case[:2]), alone(case, lambda _: theirs.MinPLogitsWarper(p)))
    same(Typical(p)(*case[:2]), alone(case, lambda _: theirs.TypicalLogitsWarper(p)))


@given(cases(), fractions)
def test_top_p(case: Case, p: float):
    """The same but for ties, of which it keeps all or none."""
    ours, other = TopP(p)(*case[:2]), alone(case, lambda _: theirs.TopPLogitsWarper(p))
    last = torch.where(other > -INF, other, INF).amin(dim=-1, keepdim=True)
    same(ours, torch.where(case.logits >= last, case.logits, -INF))


@given(cases(ties=False), fractions)
def test_top_p_without_ties(case: Case, p: float):
    same(TopP(p)(*case[:2]), alone(case, lambda _: theirs.TopPLogitsWarper(p)))


@given(cases(), st.integers(1, 4))
def test_no_repeat(case: Case, size: int):
    same(NoRepeat(size)(*case[:2]), alone(case, lambda _: theirs.NoRepeatNGramLogitsProcessor(size)))


@given(cases(), words)
def test_banned(case: Case, words: list[tuple[int, ...]]):
    words = [*words, *((*row[-2:], 0) for row in case.rows)]  # some that apply
    lists = [list(word) for word in words]
    same(Banned.words(words)(*case[:2]), alone(case, lambda _: theirs.NoBadWordsLogitsProcessor(lists)))


@given(cases(), st.integers(0, 6), st.lists(ids, min_size=1, max_size=3))
def test_minimum(case: Case, count: int, stop: list[int]):
    def their(i: int) -> theirs.LogitsProcessor:
        return theirs.MinNewTokensLengthLogitsProcessor(case.prompts[i], count, stop)

    same(MinNew(count, torch.tensor(stop))(*case[:2]), alone(case, their))


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
    new = torch.arange(case.history.ids.shape[1]) > case.history.there.int().argmax(dim=1)[:, None]
    history = case.history._replace(new=new)
    same(
        Prefix(torch.tensor([first]))(history, case.logits),
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
    options = how.model_dump(exclude={"banned", "presence_penalty", "frequency_penalty", "prefix", "no_repeat_ngram"})
    config = GenerationConfig(
        **{**options, "top_k": how.top_k or 0, "no_repeat_ngram_size": how.no_repeat_ngram or 0},
        do_sample=True,
        num_beams=1,
    )
    config.bad_words_ids = [list(word) for word in how.banned] or None
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
    torch.testing.assert_close(Presence(penalty)(*case[:2]), presence)
    torch.testing.assert_close(Frequency(penalty)(*case[:2]), frequency)


@given(cases(), st.lists(ids, min_size=1, max_size=5))
def test_prefix(case: Case, prefix: list[int]):
    expected = case.logits.clone()
    for i, (row, prompt) in enumerate(zip(case.rows, case.prompts, strict=True)):
        if len(row) - prompt < len(prefix):
            expected[i] = -INF
            expected[i, prefix[len(row) - prompt]] = 0
    same(Prefix(torch.tensor(prefix))(*case[:2]), expected)


# -- what holds for all ---------------------------------------------------------------------------------------------


def everything(constraint: Callable[[History], Tensor], device: str = "cpu") -> tuple[Processor, ...]:
    how = Sampling(
        temperature=0.7,
        top_k=4,
        top_p=0.8,
        min_p=0.1,
        typical_p=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        no_repeat_ngram=2,
        banned=((1,), (2, 3), (4, 0, 5)),
        min_new_tokens=3,
        prefix=(5, 6),
    )
    return build(how, vocab=VOCAB, stop=(0, 6), allowed=constraint, device=device)


def even(history: History) -> Tensor:
    """Even ids after even ids, else any."""
    last = history.right_aligned()[0][:, -1:]
    return (torch.arange(VOCAB, device=last.device) % 2 == 0) | (last % 2 == 1)


EACH = {type(each).__name__: each for each in everything(even)}
GREEDY_FOR_BANS = {  # each would ban everything, or all that is possible
    "a word for every id": Banned.words([(i,) for i in range(VOCAB)]),
    "every id has been seen": NoRepeat(1),
    "every id ends": MinNew(99, torch.arange(VOCAB)),
    "nothing allowed": Allowed(lambda history: torch.zeros(len(history.ids), VOCAB, dtype=torch.bool)),
}


def test_each_is_there():
    """All thirteen, in this order."""
    assert list(EACH) == [
        *("Repetition", "Presence", "Frequency", "NoRepeat", "Banned", "MinNew", "Allowed", "Prefix"),
        *("Temperature", "TopK", "TopP", "MinP", "Typical"),
    ]
    assert build(Sampling(), vocab=VOCAB, stop=(1,)) == ()
    assert build(Sampling(temperature=1.0, top_p=1.0, typical_p=1.0, min_new_tokens=5), vocab=VOCAB) == ()


@pytest.mark.parametrize("name", [*EACH, *GREEDY_FOR_BANS])
@given(case=cases())
def test_no_row_is_emptied(name: str, case: Case):
    """What was possible or not before, something is possible after, and nothing is NaN."""
    processor = {**EACH, **GREEDY_FOR_BANS}[name]
    out = processor(case.history, case.logits)
    assert not out.isnan().any()
    assert (out > -INF).any(dim=-1).all()
    assert not processor(case.history, torch.full_like(case.logits, -INF)).isnan().any()


@pytest.mark.parametrize("name", list(GREEDY_FOR_BANS))
def test_a_row_that_would_be_emptied_is_left_alone(name: str):
    """That row, and no other."""
    ids = torch.stack((torch.arange(VOCAB), torch.zeros(VOCAB, dtype=torch.long)))
    history, logits = History(ids, torch.ones_like(ids).bool(), torch.ones_like(ids).bool()), torch.randn(2, VOCAB)
    out = GREEDY_FOR_BANS[name](history, logits)
    same(out[0], logits[0])
    assert torch.equal(out[1], logits[1]) == (name != "every id has been seen")


def test_commands_hold_against_bans():
    """A constraint whose every id is banned, and a prefix that is, too."""
    history = History(torch.zeros(1, 1).long(), torch.ones(1, 1).bool(), torch.zeros(1, 1).bool())
    bans, logits = Banned.words([(2,), (3,), (5,)]), torch.randn(1, VOCAB)
    only = Allowed(lambda _: (torch.arange(VOCAB) == 2)[None] | (torch.arange(VOCAB) == 3))
    assert process([bans, only], history, logits)[0].softmax(dim=-1).tolist() == [0, 0, 0.5, 0.5, 0, 0, 0]
    assert process([bans, only, Prefix(torch.tensor([5]))], history, logits).argmax() == 5


@pytest.mark.parametrize("name", EACH)
@given(case=cases())
def test_nan_stays(name: str, case: Case):
    """So that whoever chooses can tell; the rows beside are not disturbed."""
    broken = torch.cat((case.logits, case.logits[:1]))
    broken[-1, 0] = math.nan
    history = History(*(torch.cat((x, x[:1])) for x in case.history))
    out = EACH[name](history, broken)
    assert out[-1].isnan().any()
    same(out[:-1], EACH[name](case.history, case.logits))
    assert sample(out, torch.arange(len(out)), torch.zeros(len(out))).ok.tolist() == [True] * (len(out) - 1) + [False]


@given(case=cases(), more=st.integers(0, 3))
def test_gaps_are_nothing(case: Case, more: int):
    """Rows moved to the left and padded with anything: the same to the last bit."""
    longest = max(map(len, case.rows)) + more
    ids, there, new = torch.full((len(case.rows), longest), 3), *torch.zeros(2, len(case.rows), longest).bool()
    for i, (row, prompt) in enumerate(zip(case.rows, case.prompts, strict=True)):
        ids[i, : len(row)], there[i, : len(row)] = torch.tensor(row, dtype=torch.long), True
        new[i, prompt : len(row) + more] = True
    assume(longest and all(case.rows))  # `even` looks at the last token
    processors = everything(even)
    same(process(processors, History(ids, there, new), case.logits), process(processors, *case[:2]))


@pytest.mark.parametrize("name", EACH)
@given(case=cases())
def test_pure(name: str, case: Case):
    """Nothing that goes in is changed."""
    before = [x.clone() for x in (*case.history, case.logits)]
    EACH[name](case.history, case.logits)
    assert all(torch.equal(x, y) for x, y in zip(before, (*case.history, case.logits), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_widened(dtype: torch.dtype):
    history = History(torch.tensor([[0, 1, 2]]), torch.ones(1, 3).bool(), torch.tensor([[False, True, True]]))
    logits = torch.randn(1, VOCAB).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = process(everything(even), history, logits)
    assert out.dtype == wide
    same(out, process(everything(even), history, logits.to(wide)))


@pytest.mark.parametrize("name", ["TopK", "TopP", "MinP", "Typical"])
@given(case=cases(), seed=st.integers(0, 99))
def test_names_of_tokens_do_not_matter(name: str, case: Case, seed: int):
    """Ties stay together, so the vocabulary may come in any order."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    same(EACH[name](case.history, case.logits[:, order]), EACH[name](*case[:2])[:, order])


@pytest.mark.parametrize("name", EACH)
def test_ids_beyond_the_logits(name: str):
    """An input vocabulary larger than the output's: such ids are never chosen, so nothing is to be done about them."""
    there = torch.ones(2, 4).bool()
    ids, logits = torch.tensor([[1, VOCAB, 2, 1], [1, VOCAB + 5, 3, 1]]), torch.randn(2, VOCAB)
    out = EACH[name](History(ids, there, there), logits)
    assert out.shape == logits.shape
    if name in ("Repetition", "Presence", "Frequency"):
        touched = [set(row.nonzero().flatten().tolist()) for row in out != logits]
        assert touched == [{1, 2}, {1, 3}]


# -- the host is not asked ------------------------------------------------------------------------------------------


def test_shapes_alone_suffice():
    """On the meta device there is nothing to read."""
    ids = torch.zeros(3, 5, dtype=torch.long, device="meta")
    history = History(ids, ids.bool(), ids.bool())
    out = process(everything(even, "meta"), history, torch.zeros(3, VOCAB, device="meta"))
    assert out.shape == (3, VOCAB)


def test_one_graph():
    """A step with all of them compiles once, whatever the rows hold."""
    processors = everything(even)

    def step(history: History, logits: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        out = process(processors, history, logits)
        return out, sample(out, seeds, history.answered()).ids

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for i in range(6):
        generator = torch.Generator().manual_seed(i)
        ids, there = torch.randint(0, VOCAB, (3, 8), generator=generator), torch.arange(8).expand(3, 8) < 2 + i
        args = (
            History(ids, there, torch.arange(8) >= torch.tensor([[1], [2], [2]])),
            torch.randn(3, VOCAB),
            torch.arange(3),
        )
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            assert all(torch.equal(a, b) for a, b in zip(compiled(*args), step(*args), strict=True))


# -- errors ---------------------------------------------------------------------------------------------------------

WRONG = {
    "negative temperature": ({"temperature": -0.1}, "temperature = -0.1: must be at least 0"),
    "infinite temperature": ({"temperature": INF}, "temperature = inf: must be a finite number"),
    "top-k of none": ({"temperature": 1.0, "top_k": 0}, "top_k = 0: must be at least 1"),
    "half of top-k": ({"temperature": 1.0, "top_k": 1.5}, "top_k = 1.5: must be a whole number"),
    "top-p of nothing": ({"temperature": 1.0, "top_p": 0.0}, "top_p = 0.0: must be greater than 0"),
    "top-p of more than all": ({"temperature": 1.0, "top_p": 1.5}, "top_p = 1.5: must be at most 1"),
    "min-p of more than all": ({"temperature": 1.0, "min_p": 1.5}, "min_p = 1.5: must be at most 1"),
    "typical of nothing": ({"temperature": 1.0, "typical_p": 0.0}, "typical_p = 0.0: must be greater than 0"),
    "top-k of the likeliest": ({"top_k": 5}, "top_k = 5: needs a temperature above 0"),
    "a penalty of 0": ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0: must be greater than 0"),
    "no number": ({"presence_penalty": math.nan}, "presence_penalty = nan: must be a finite number"),
    "n-grams of nothing": ({"no_repeat_ngram": 0}, "no_repeat_ngram = 0: must be at least 1"),
    "an empty word": ({"banned": ((1,), ())}, r"banned.1 = \(\): .*at least 1 item"),
    "a negative id": ({"banned": ((1, -2),)}, "banned.0.1 = -2: must be at least 0"),
    "a negative minimum": ({"min_new_tokens": -1}, "min_new_tokens = -1: must be at least 0"),
    "a negative prefix": ({"prefix": (-1,)}, "prefix.0 = -1: must be at least 0"),
    "a misspelt name": ({"topp": 0.5}, "topp: unknown key; did you mean 'top_p'?"),
    "a word outside the vocabulary": ({"banned": ((1, 9),)}, "banned.0 = 9: no such id; the vocabulary has 7"),
    "a prefix outside the vocabulary": ({"prefix": (7,)}, "prefix = 7: no such id; the vocabulary has 7"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_one_clear_line(case: str):
    options, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as error:
        build(Sampling(**options), vocab=VOCAB)
    assert "\n" not in str(error.value)


def test_a_wrong_end():
    with pytest.raises(ConfigError, match="stop = 12: no such id; the vocabulary has 7"):
        build(Sampling(), vocab=VOCAB, stop=(12,))
    with pytest.raises(ConfigError, match="stop = -1: no such id"):
        build(Sampling(), vocab=VOCAB, stop=(-1,))
