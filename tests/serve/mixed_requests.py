"""Random requests of all kinds, and engines that answer many of them at once; for tests on the CPU and on a GPU."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

import anyformer as af
from anyformer import presets
from anyformer.generation.constraints.constraint import Trie
from anyformer.generation.engine.interface import Finished, Limits, Token
from anyformer.generation.engine.stats import Stats
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam, Sampling
from tests.serve.responsive import responsive

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
def build(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> af.Transformer:
    return responsive(af.Transformer(MODELS[name]()).eval()).to(device, dtype)


def ask(ids: Sequence[int], *how, **options) -> Request:
    """A request with one prompt."""
    return Request(torch.tensor([list(ids)]), *how, **options)


def draw(rng: random.Random) -> Request:
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
            return ask(ids, new, sampling, STOP, seed=rng.randrange(100))
        case 1:
            return ask(ids, new, Sampling(repetition_penalty=1.3, no_repeat_ngram=2, frequency_penalty=0.4), STOP)
        case 2:
            return ask(ids, max(new, 5), Sampling(), STOP, constraint=trie)
        case 3:
            beam = Beam(beams=rng.choice([2, 3]), n_best=2, length_penalty=rng.choice([0.0, 1.0]))
            return ask(ids, new, beam, STOP, constraint=trie if rng.random() < 0.3 else None)
        case _:
            return ask(ids, new + 12, Sampling(), rng.choice([STOP, (), ()]))


def draw_all(name: str, count: int, late: bool = False) -> list[Request]:
    """Return requests for a model; with `late`, those whose next token the host need not know."""
    rng = random.Random(name)
    requests = [draw(rng) for _ in range(count)]
    if late:
        requests = [one for one in requests if one.constraint is None and isinstance(one.strategy, Sampling)]
    if build(name).encoder is not None:  # short sources, so that pages of answers run out first
        requests = [replace(request, ids=request.ids[:, -6:]) for request in requests]
    return requests


async def answer(engine: af.Engine, request: Request) -> list:
    """Return the tokens of a request, or its two best hypotheses."""
    if isinstance(request.strategy, Beam):
        return await engine.search(request, 2)
    *events, end = [event async for event in engine.submit(request)]
    assert isinstance(end, Finished)
    assert end.reason == ("stop" if events[-1].id in request.stop else "length"), end.message
    assert all(isinstance(event, Token) for event in events)
    return events


async def answer_all(
    model: af.Transformer, requests: Sequence[Request], limits: Limits, late: bool | None = None
) -> tuple[list, Stats]:
    """Answer requests that arrive in random order at about the same time. `late`: tokens are read one step late."""
    rng = random.Random(0)
    engine = af.Engine(model, limits)
    server = engine._servers["model"]
    server.overlaps = server.overlaps if late is None else late
    async with engine:

        async def one(request: Request) -> list:
            await asyncio.sleep(rng.random() * 0.2)
            return await answer(engine, request)

        answers = await asyncio.wait_for(asyncio.gather(*map(one, requests)), 120)
        stats = engine.stats()["model"]
        assert server.pages.own.used == 0, "no page leaks"
        assert server.pages.source.used == 0
        assert (stats.running, stats.waiting) == (0, 0)
        return answers, stats


async def answer_each(model: af.Transformer, requests: Sequence[Request], limits: Limits) -> list:
    """Answer requests one after the other."""
    async with af.Engine(model, limits) as engine:
        return [await answer(engine, request) for request in requests]
