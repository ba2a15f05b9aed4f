"""Speculative decoding: by token-by-token decoding, and its draws by the probabilities of all short answers."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from anyformer.config import (
    LM,
    Attention,
    Block,
    ConfigError,
    Features,
    Learned,
    MaskedLM,
    ModelConfig,
    Recurrent,
    Rotary,
    Special,
    Stack,
    Tokens,
    Window,
)
from anyformer.decoding import speculative
from anyformer.decoding.constrain import Constraint, Trie
from anyformer.decoding.decode import Spoilt, generate
from anyformer.decoding.process import History, Sampling, build as build_processors, process
from anyformer.decoding.retrace import Retracing
from anyformer.decoding.speculative import Draft, Guess, LookingUp, Lookup, speculate
from anyformer.nn.cache import Cache
from anyformer.nn.model import Transformer
from tests.strategies import VOCAB, build, close, models, seeds, speaks, tokens

BLOCK = Block(mixer=Attention(heads=2))
READ = Tokens(vocab=VOCAB)
STACK = Stack(depth=2, blocks=(BLOCK,), position=Rotary())
CROSSING = STACK.model_copy(update={"blocks": (BLOCK.model_copy(update={"cross": Attention(heads=2)}),)})
SPECIAL = Special(pad=0, start=1)
MIXED = STACK.model_copy(
    update={
        "depth": 3,
        "blocks": (
            Block(mixer=Attention(heads=2, pattern=Window(before=2, after=0))),
            Block(mixer=Recurrent(cell="lstm")),
            BLOCK,
        ),
    }
)

either = models(shapes=("decoder", "encoder-decoder")).filter(speaks)  # or all tokens may be equally likely
kinds = st.sampled_from(["auto", "static", "int8"])
drafts = st.sampled_from(["itself", "another", "lookup", "lookup of 1"])


def decoder(seed: int = 0, **fields: Any) -> Transformer:
    parts = {"width": 8, "target": READ, "decoder": STACK, "head": LM(), "special": SPECIAL}
    return build(ModelConfig(**{**parts, **fields}), seed)


def pair(seed: int = 0, **fields: Any) -> Transformer:
    parts = {"width": 8, "source": READ, "target": READ, "encoder": STACK, "decoder": CROSSING, "head": LM()}
    return build(ModelConfig(**{**parts, "special": SPECIAL, **fields}), seed)


def nearly(model: Transformer) -> Transformer:
    """A model that mostly agrees."""
    other = build(model.config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.03)
    return other


def drafting(kind: str, model: Transformer, seed: int = 0) -> Draft | Lookup:
    match kind:
        case "itself":
            return Draft(model)
        case "another":
            return Draft(build(model.config, seed + 1))
        case "nearly":
            return Draft(nearly(model))
        case "lookup":
            return Lookup()
        case _:
            return Lookup(ngram=1)


def ragged(seed: int, lengths: list[int], side: str) -> tuple[Tensor, Tensor]:
    longest = max(lengths)
    segments = torch.full((len(lengths), longest), -1)
    for i, length in enumerate(lengths):
        segments[i, slice(longest - length, None) if side == "left" else slice(length)] = 0
    return tokens(seed, len(lengths), longest), segments


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
    """Rows that agree with different numbers of guesses leave gaps, which are closed when the cache is full."""
    model, ids = decoder(decoder=MIXED), tokens(1, 6, 5)
    draft = drafting(kind, model)
    monkeypatch.setattr(speculative, "CALLS", 1)  # as little room as can be
    closed, compact = [], Cache.compact
    monkeypatch.setattr(Cache, "compact", lambda self, first: closed.append(first) or compact(self, first))
    how = {"max_new_tokens": 30, "cache": cache}
    found = speculate(model, ids, draft=draft, ahead=3, **how)
    assert torch.equal(found.ids, generate(model, ids, **how))
    assert closed
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
        with pytest.raises(Spoilt, match="row 1: ") as error:
            call(model, ids, max_new_tokens=8, banned=((3,),))
        told.append(error.value)
    assert [error.rows for error in told] == [[1]] * 3
    assert all(torch.equal(error.ids, told[0].ids) for error in told)


def _by_lookup(*args: Any, **how: Any) -> None:
    speculate(*args, draft=Lookup(), **how)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 0}], ids=["greedy", "drawn"])
def test_a_spoilt_draft_spoils_nothing(how: dict[str, Any]):
    """It guesses nothing from there on."""
    model, draft, ids = decoder(), decoder(1), tokens(0, 3, 4)
    with torch.no_grad():
        draft.head.table.fill_(torch.nan)
    found = speculate(model, ids, draft=Draft(draft), max_new_tokens=8, **how)
    assert torch.equal(found.ids, generate(model, ids, max_new_tokens=8, **how))
    assert not found.drafted.any()


# -- draws ----------------------------------------------------------------------------------------------------------

TINY, STEPS, ROWS = 5, 3, 8000
tiny = {"target": Tokens(vocab=TINY), "special": Special()}


def chances(model: Transformer, prompt: Tensor, stop: tuple[int, ...], **how: Any) -> dict[tuple[int, ...], float]:
    """The probability of every answer, without a cache."""
    processors = build_processors(Sampling(**how), vocab=TINY, stop=stop)
    found: dict[tuple[int, ...], float] = {}
    ongoing = {(): 1.0}
    for _ in range(STEPS):
        longer: dict[tuple[int, ...], float] = {}
        for answer, chance in ongoing.items():
            row = torch.cat((prompt, torch.tensor(answer, dtype=torch.long)))[None]
            new = torch.arange(row.shape[1]) >= len(prompt)
            history = History(row, torch.ones_like(row, dtype=torch.bool), new[None])
            p = process(processors, history, model(row)[:, -1]).softmax(dim=-1)[0].tolist()
            for token in range(TINY):
                (found if token in stop else longer)[(*answer, token)] = chance * p[token]
        ongoing = longer
    return {answer: chance for answer, chance in (found | ongoing).items() if chance > 0}


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """In standard deviations above what is to be expected; what is rare counts together."""
    total = sum(counts.values())
    often = [answer for answer, p in expected.items() if total * p > 5]
    cells = [(counts[answer], total * expected[answer]) for answer in often]
    cells.append((total - sum(seen for seen, _ in cells), max(total - sum(mean for _, mean in cells), 1.0)))
    chi = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return (chi - len(often)) / (2 * len(often)) ** 0.5


@pytest.mark.parametrize(
    ("how", "stop", "ahead"),
    [
        ({"temperature": 1.0}, (), 1),
        ({"temperature": 1.0}, (), 2),
        ({"temperature": 0.8, "repetition_penalty": 1.4}, (2,), 2),
        ({"temperature": 1.5, "top_k": 3, "frequency_penalty": 0.5}, (), 2),
        ({"temperature": 1.2, "top_p": 0.8, "min_new_tokens": 2}, (0,), 2),
    ],
    ids=["one", "two", "penalty", "top-k", "top-p"],
)
@torch.no_grad()
def test_draws_have_the_probabilities_of_the_model(how: dict[str, Any], stop: tuple[int, ...], ahead: int):
    """Not those of the draft, which are others: by a chi-square test over all answers."""
    model, draft, prompt = decoder(**tiny), decoder(7, **tiny), torch.tensor([0, 2, 1])
    for part in (model, draft):
        part.head.table.mul_(0.3)  # so that many answers are likely
    found = speculate(
        model,
        prompt.expand(ROWS, 3),
        draft=Draft(draft),
        ahead=ahead,
        max_new_tokens=STEPS,
        stop=stop,
        seed=ahead,
        **how,
    )
    counts: Counter[tuple[int, ...]] = Counter()
    for row in found.ids[:, 3:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stop), STEPS)
        counts[tuple(row[:end])] += 1
    wanted = chances(model, prompt, stop, **how)
    assert counts.keys() <= wanted.keys()
    assert chi_square(counts, wanted) < 4
    assert chi_square(counts, chances(draft, prompt, stop, **how)) > 20
    rate = float(found.accepted.sum() / found.drafted.sum())
    assert 0.2 < rate < 0.95  # both ways are taken


@pytest.mark.parametrize("kind", ["nearly", "lookup"])
@pytest.mark.parametrize("make", [decoder, pair])
def test_a_row_draws_its_own_in_any_batch(make: Callable[..., Transformer], kind: str):
    model, draws = make(), torch.arange(3) * 1000
    draft = drafting(kind, model)
    ids, segments = ragged(0, [3, 6, 1], "left")
    how = {"draft": draft, "max_new_tokens": 10, "stop": (4,), "temperature": 1.5}
    together = speculate(model, ids, segments=segments, seed=draws, **how)
    prompt = 1 if model.encoder else ids.shape[1]
    for i in range(3):
        row = ids[i : i + 1, segments[i] == 0]
        alone = speculate(model, row, seed=draws[i : i + 1], **how)
        mine = alone.ids[0, 1 if model.encoder else row.shape[1] :]
        theirs = together.ids[i, prompt:]
        assert torch.equal(mine, theirs[: len(mine)])
        assert (theirs[len(mine) :] == 0).all()
        assert int(alone.drafted) == int(together.drafted[i])
        assert int(alone.accepted) == int(together.accepted[i])


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
        guess: Guess = LookingUp(ngram, *before).propose(text, limit)
        mine = [row[found].tolist() for row, found in zip(guess.ids, guess.there, strict=True)]
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

    def in_time(self, states: Tensor, left: Tensor) -> Tensor:
        return self.allowed(states * 7 + left)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        return (states * 31 + tokens * 17 + 1) % 1021


edits = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=2))  # tokens taken back, and said instead


@given(st.lists(st.tuples(edits, edits), min_size=8, max_size=12))
def test_a_constraint_follows_answers_that_are_taken_back(changes: list[tuple[tuple[int, list[int]], ...]]):
    """Whatever it was asked before, it allows what a walk from the start does; prompts and gaps do not count."""
    constraint, rooms = Remembering(VOCAB, (0,)), torch.tensor([26, 29])
    allowed = Retracing(constraint, rooms.tolist(), rooms.device)
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
        assert torch.equal(allowed(History(ids, there, new)), constraint.in_time(torch.cat(states), left))


# -- taking back ----------------------------------------------------------------------------------------------------


@given(models(shapes=("decoder",)), seeds, st.lists(st.integers(0, 3), min_size=3, max_size=3), kinds, st.booleans())
def test_forgetting_is_as_if_it_had_not_been_read(
    config: ModelConfig, seed: int, dropped: list[int], kind: str, compact: bool
):
    """Each row another number of its newest tokens, again and again, with gaps between them or not."""
    model, length = build(config, seed), 5
    cache = model.new_cache(3, 20, kind=kind, slack=4)
    ids, rest, last = tokens(seed, 3, length), tokens(seed + 1, 3, 3), tokens(seed + 2, 3, 2)
    with torch.no_grad():
        model.decode(ids, cache=cache)
        rows = [row[: length - n] for row, n in zip(ids, dropped, strict=True)]
        for new, back in ((rest, [1, 0, 2]), (last, [0, 0, 0])):
            cache.forget(torch.tensor(dropped))
            if compact:
                cache.compact(1)
                assert cache.taken == max(map(len, rows))
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
    with pytest.raises(ValueError, match="keeps only 2 more"):
        cache.forget(torch.tensor([1, 3]))
    cache.forget(torch.tensor([1, 2]))


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
        "draft: guesses no tokens: must be a model with a decoder and an `lm` head",
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
