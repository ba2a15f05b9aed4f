"""Requests of mixed kinds in a busy engine are answered as if each were alone."""

import asyncio
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import anyformer as af
from anyformer import presets
from anyformer.decoding.beam_search import run_beam_search
from anyformer.decoding.constraints.constraint import Trie
from anyformer.decoding.generate import run_sampling
from anyformer.decoding.strategy import Beam, Sampling
from anyformer.serve.admission import as_request
from anyformer.serve.beams import hypotheses
from anyformer.serve.request import Finished, Generation, Limits, Token
from anyformer.serve.stats import Stats
from tests import loop

VOCAB, STOP = 61, (5, 9)
SIZES = {"depth": 2, "width": 32, "heads": 4, "vocab": VOCAB}
MODELS = {
    "gpt2": lambda: presets.gpt2(**SIZES),
    "llama": lambda: presets.llama(**SIZES, kv_heads=2),
    "t5": lambda: presets.t5(**SIZES),
    "marian": lambda: presets.vaswani(**SIZES),
}
# few pages force preemption; small chunks and budgets force chunked prefill
BUSY = Limits(max_rows=12, page_size=4, pages=40, prefill_tokens=24, chunk=8)
PAIR = BUSY.model_copy(update={"pages": 16})


@cache
def build(name: str) -> af.Transformer:
    torch.manual_seed(1)
    config = MODELS[name]()
    model = af.Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # distinct logits
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def draw(rng: random.Random) -> Generation:
    """A request of any kind; prompts share beginnings."""
    shared = list(range(20, 20 + rng.choice([0, 4, 13, 22])))
    ids = tuple(shared + [rng.randrange(10, VOCAB) for _ in range(rng.randint(1, 14))])
    new, kind = rng.randint(1, 14), rng.randrange(6)
    trie = Trie(
        [[rng.randrange(10, VOCAB) for _ in range(rng.randint(1, 4))] for _ in range(5)], vocab=VOCAB, stop=STOP
    )
    match kind:
        case 0:
            sampling = Sampling(temperature=0.9, top_k=rng.choice([None, 5]), top_p=rng.choice([None, 0.8]))
            return Generation(ids, new, sampling, STOP, seed=rng.randrange(100))
        case 1:
            return Generation(
                ids, new, Sampling(repetition_penalty=1.3, no_repeat_ngram=2, frequency_penalty=0.4), STOP
            )
        case 2:
            return Generation(ids, max(new, 5), Sampling(), STOP, constraint=trie)
        case 3:
            beam = Beam(beams=rng.choice([2, 3]), n_best=2, length_penalty=rng.choice([0.0, 1.0]))
            return Generation(ids, new, beam, STOP, constraint=trie if rng.random() < 0.3 else None)
        case _:
            return Generation(ids, new + 12, Sampling(), rng.choice([STOP, (), ()]))


def alone(model: af.Transformer, generation: Generation):
    request, strategy = as_request(generation), generation.strategy
    if isinstance(strategy, Beam):
        return hypotheses(run_beam_search(model, request, strategy))
    ids = run_sampling(model, request, strategy)[0].tolist()
    answer = ids[1 if model.encoder is not None else len(generation.ids) :]
    ends = [i for i, id in enumerate(answer) if id in generation.stop]
    return answer[: ends[0] + 1] if ends else answer


async def busy(model: af.Transformer, requests: list[Generation], limits: Limits, late: bool) -> tuple[list, Stats]:
    """All requests at about the same time, in random order of arrival. `late`: tokens are read one step late."""
    rng = random.Random(0)
    engine = af.Engine(model, limits)
    engine._servers["model"].overlaps = late
    async with engine:

        async def one(generation: Generation):
            await asyncio.sleep(rng.random() * 0.2)
            if isinstance(generation.strategy, Beam):
                return await engine.search(generation, 2)
            events = [event async for event in engine.submit(generation)]
            end = events.pop()
            assert isinstance(end, Finished)
            assert end.reason == ("stop" if events[-1].id in generation.stop else "length")
            return [event.id for event in events if isinstance(event, Token)]

        answers = await asyncio.wait_for(asyncio.gather(*map(one, requests)), 120)
        stats = engine.stats()["model"]
        server = engine._servers["model"]
        assert server.pages.own.used == 0, "no page leaks"
        assert server.pages.source.used == 0
        assert (stats.running, stats.waiting) == (0, 0)
        return answers, stats


def check(name: str, count: int, limits: Limits, late: bool = False) -> Stats:
    model, rng = build(name), random.Random(name)
    requests = [draw(rng) for _ in range(count)]
    if late:  # those whose next token the host need not know
        requests = [one for one in requests if one.constraint is None and isinstance(one.strategy, Sampling)]
    if model.encoder is not None:  # short sources, so that pages of answers run out first
        requests = [replace(request, ids=request.ids[-6:]) for request in requests]
    answers, stats = loop.run(busy(model, requests, limits, late))
    for request, answer in zip(requests, answers, strict=True):
        expected = alone(model, request)
        if isinstance(request.strategy, Beam):
            assert [h.ids for h in answer] == [h.ids for h in expected]
            assert [h.score for h in answer] == pytest.approx([h.score for h in expected], abs=1e-4)
        else:
            assert answer == expected, request
    return stats


@pytest.mark.parametrize("name", MODELS)
def test_answers_do_not_depend_on_other_requests(name: str):
    check(name, 16, PAIR if build(name).encoder else BUSY)


@pytest.mark.parametrize("name", ["llama", "marian"])
def test_tokens_that_are_read_one_step_late(name: str):
    check(name, 30, PAIR if build(name).encoder else BUSY.model_copy(update={"pages": 24}), late=True)


def test_requests_that_run_out_of_pages():
    """Six answers of 11 pages in a cache of 23: some give their pages back, and are read again."""
    model = build("llama")
    requests = [Generation((2 + i, 3, 4 + i), 40) for i in range(6)]
    answers, stats = loop.run(busy(model, requests, BUSY.model_copy(update={"pages": 24}), late=False))
    assert stats.preemptions
    assert answers == [alone(model, request) for request in requests]


@pytest.mark.system
@pytest.mark.parametrize("name", MODELS)
def test_fifty_requests_each(name: str):
    stats = check(name, 50, PAIR if build(name).encoder else BUSY)
    assert stats.cached_tokens or build(name).encoder is not None


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_reproducible_engine(name: str):
    limits = BUSY.model_copy(update={"reproducible": True, "pages": 200})
    assert not check(name, 10, limits).preemptions
