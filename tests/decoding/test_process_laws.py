"""Laws of all logit processors: no row is emptied, inputs are left alone, one graph; and wrong options."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

from anyformer.config import ConfigError
from anyformer.generation.filters import PlainFilter
from anyformer.generation.logit_processors import Allowed, History, Processor, build, process
from anyformer.generation.sampling import sample
from anyformer.generation.strategy import Sampling, options
from tests.decoding.logit_cases import INF, VOCAB, Case, cases, option, same

# -- what holds for all ---------------------------------------------------------------------------------------------


VALUES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "bias": ((2, 0.5),),
    "no_repeat_ngram": 2,
    "banned": ((1,), (2, 3), (4, 0, 5)),
    "min_new_tokens": 3,
    "prefix": (5, 6),
    "top_k": 4,
    "top_p": 0.8,
    "min_p": 0.1,
    "typical_p": 0.9,
}


def everything(constraint: Callable[[History], Tensor], device: str = "cpu") -> tuple[Processor, ...]:
    return build(Sampling(temperature=0.7, **VALUES), vocab=VOCAB, stop=(0, 6), allowed=constraint, device=device)


def even(history: History) -> Tensor:
    """Even ids after even ids, else any."""
    last = history.right_aligned()[0][:, -1:]
    return (torch.arange(VOCAB, device=last.device) % 2 == 0) | (last % 2 == 1)


ORDER = [*list(VALUES)[:7], "allowed", "prefix", "temperature", *list(VALUES)[8:]]
EACH = dict(zip(ORDER, everything(even), strict=True))
GREEDY_FOR_BANS = {  # each would ban everything, or all that is possible
    "a word for every id": option(banned=tuple((i,) for i in range(VOCAB))),
    "every id has been seen": option(no_repeat_ngram=1),
    "every id ends": option(range(VOCAB), min_new_tokens=99),
    "nothing allowed": Allowed(lambda history: torch.zeros(len(history.ids), VOCAB, dtype=torch.bool)),
}


def test_each_is_there():
    """In the order of `transformers`, whatever the order in which they are given."""
    assert list(VALUES) == [name for name, option in options().items() if option.filter]
    assert [one.value for one in Sampling(temperature=0.7, **dict(reversed(VALUES.items()))).filters] == [
        *VALUES.values()
    ]
    made = {name: EACH[name] for name in VALUES if isinstance(EACH[name], PlainFilter)}
    assert {name: one.kind for name, one in made.items()} == {name: name for name in made}
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


EXTREMES = st.sampled_from([-1e30, -2.0, 0.0, 5e-324, 2.0, 1e30])


@given(case=cases(), data=st.data())
def test_every_valid_option_leaves_a_distribution(case: Case, data: st.DataObject):
    """Whatever the options, finite logits stay finite at their maximum, also if every id has been seen."""
    how = Sampling(
        temperature=data.draw(st.sampled_from([5e-324, 1e-3, 1.1e-3, 1.0, 1e308])),
        top_k=data.draw(st.sampled_from([None, 1, 2**62])),
        top_p=data.draw(st.sampled_from([None, 5e-324, 0.5])),
        min_p=data.draw(st.sampled_from([None, 5e-324, 1.0])),
        typical_p=data.draw(st.sampled_from([None, 5e-324, 0.5])),
        repetition_penalty=data.draw(st.sampled_from([1e-3, 1.0, 6.5, 1e3])),
        presence_penalty=data.draw(EXTREMES),
        frequency_penalty=data.draw(EXTREMES),
        bias=tuple((id, data.draw(EXTREMES)) for id in range(VOCAB)),
    )
    out = process(build(how, vocab=VOCAB), case.history, 1e3 * case.logits)
    assert sample(out, torch.arange(len(out)), torch.arange(len(out))).ok.all()
    assert not out.isnan().any()


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
    bans, logits = option(banned=((2,), (3,), (5,))), torch.randn(1, VOCAB)
    only = Allowed(lambda _: (torch.arange(VOCAB) == 2)[None] | (torch.arange(VOCAB) == 3))
    assert process([bans, only], history, logits)[0].softmax(dim=-1).tolist() == [0, 0, 0.5, 0.5, 0, 0, 0]
    assert process([bans, only, option(prefix=(5,))], history, logits).argmax() == 5


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


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "typical_p"])
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
    if name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
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
    "a penalty of 0": ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0: must be at least 0.001"),
    "a penalty that overflows": ({"repetition_penalty": 5e-324}, "repetition_penalty = 5e-324: must be at least 0.001"),
    "an endless penalty": ({"frequency_penalty": 1e308}, r"frequency_penalty = 1e\+308: must be at most 1e\+30"),
    "a bias beyond fp32": ({"bias": ((1, 1e39),)}, r"bias.0.1 = 1e\+39: must be at most 1e\+30"),
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
