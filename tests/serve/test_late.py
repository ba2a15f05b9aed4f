"""Answers whose tokens the host reads one step late, as on a GPU, are those of tokens that are read at once."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import pytest

import anyformer as af
from anyformer import presets
from anyformer.generation.engine.adapters import share_body
from anyformer.generation.engine.interface import Finished, Limits, Token
from anyformer.generation.engine.outbox import Outbox
from anyformer.generation.engine.paged_server import PagedServer
from anyformer.generation.engine.sequence import Item, Sequence as Answering, TokenIds
from anyformer.generation.engine.stats import Stats
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam, Sampling
from tests.serve.mixed_requests import MODELS, ask, build, draw
from tests.serve.responsive import responsive
from tests.serve.test_adapters import adapted

Adapters = dict[str, af.Transformer]


@cache
def models(name: str) -> tuple[af.Transformer, Adapters]:
    body = build(name)
    return body, {adapter: share_body(adapter, body, adapted(body, seed)) for seed, adapter in enumerate("ab")}


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it arrives, and that before which it is cancelled, if it is."""

    request: Request
    step: int
    cancelled: int | None
    streams: bool


def draw_arrivals(rng: random.Random, count: int, waits: bool, pair: bool) -> list[Arrival]:
    """Return requests of all kinds. `waits`: only those whose next token the host need not know."""
    found: list[Arrival] = []
    while len(found) < count:
        request = draw(rng)
        if waits and (request.constraint is not None or isinstance(request.strategy, Beam)):
            continue
        if not waits and not isinstance(request.strategy, Beam) and rng.random() < 0.2:
            request = replace(request, top=2, prompt_logprobs=rng.random() < 0.5)
        if pair:  # short sources, so that pages of answers run out first
            request = replace(request, ids=request.ids[:, -6:], prompt_logprobs=False)
        request = replace(request, adapter=rng.choice((None, None, "a", "b")))
        step = rng.randrange(count)
        cancelled = step + rng.randrange(20) if rng.random() < 0.1 else None
        found.append(Arrival(request, step, cancelled, rng.random() < 0.5))
    return found


class Collector(Outbox):
    """Keeps all events; other tokens than first and last ones are due at random."""

    def __init__(self, seed: int):
        super().__init__(Stats())
        self._rng = random.Random(seed)

    def is_due(self) -> bool:
        return self._rng.random() < 0.3


def serve(server: PagedServer, arrivals: Sequence[Arrival]) -> list[list[Item]]:
    """Return the events of each request."""
    out = Collector(len(arrivals))
    sequences = [Answering(one.request, streams=one.streams) for one in arrivals]
    step = 0
    while step <= max(one.step for one in arrivals) or server.busy:
        for sequence, one in zip(sequences, arrivals, strict=True):
            if one.step == step:
                server.add(sequence)
            sequence.cancelled = sequence.cancelled or one.cancelled == step
        server.step(out)
        step += 1
    assert server.pages.own.used == 0, "no page leaks"
    assert server.pages.source.used == 0
    assert (out.stats.running, out.stats.started) == (0, len(sequences))
    return [sequence.events for sequence in sequences]


def answer(events: Sequence[Item]) -> tuple[list[object], str]:
    """Return ids, or those of hypotheses, and the reason of the end."""
    *tokens, end = events
    if isinstance(end, list):
        return [hypothesis.ids for hypothesis in end], "stop"
    assert isinstance(end, Finished), end
    ids = (one if isinstance(one, TokenIds) else [one.id] for one in tokens if isinstance(one, TokenIds | Token))
    return list(chain.from_iterable(ids)), end.reason


CALM = Limits(max_rows=64, pages=400)


def check(
    body: af.Transformer, adapters: Adapters, limits: Limits, arrivals: Sequence[Arrival], late: bool
) -> tuple[PagedServer, list[str]]:
    """Compare with a calm engine that reads tokens at once; return the engine, and how its requests have ended."""
    calm, busy = PagedServer(body, CALM, adapters), PagedServer(body, limits, adapters)
    calm.overlaps, busy.overlaps = False, late
    expected = serve(calm, [replace(one, step=0, cancelled=None, streams=True) for one in arrivals])
    found = list(map(answer, serve(busy, arrivals)))
    for one, (ids, reason), whole in zip(arrivals, found, map(answer, expected), strict=True):
        if reason == "cancelled":
            assert one.cancelled is not None
            assert ids == whole[0][: len(ids)], one
        else:
            assert (ids, reason) == whole, one
    return busy, [reason for _, reason in found]


@pytest.mark.parametrize("name", MODELS)
def test_requests_of_all_kinds(name: str) -> None:
    """Few pages and rows for beams beside greedy rows, adapters, and requests that end, are cancelled or preempted."""
    body, adapters = models(name)
    seen: Counter[str] = Counter()
    for waits in (True, False):
        rng = random.Random(sum(seen.values()))
        limits = Limits(
            max_rows=rng.choice([4, 8]),  # as many as a search has beams, or more
            page_size=rng.choice([2, 4]),
            pages=42 if body.encoder is None else 26,  # hardly more than the longest request takes
            prefill_tokens=rng.choice([8, 24, 200]),
            chunk=rng.choice([3, 8, 50]),
            reuse=rng.random() < 0.5,
        )
        arrivals = draw_arrivals(rng, 16, waits, body.encoder is not None)
        busy, reasons = check(body, adapters, limits, arrivals, late=True)
        seen.update(reasons)
        seen["preempted"] += busy.stats.preemptions
    assert seen.keys() >= {"stop", "length", "cancelled"}
    assert seen["preempted"]


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
def test_an_answer_beside_one_that_cannot_wait(late: bool) -> None:
    """Tokens that were decoded ahead and those after them are delivered in order, in one piece and streamed."""
    body, first = build("llama"), ask((12, 30, 17), 24)
    for streams in (False, True):
        arrivals = [Arrival(first, 0, None, streams), Arrival(replace(first, top=0, max_new_tokens=3), 6, None, True)]
        check(body, {}, Limits(pages=40), arrivals, late)


def small_model() -> af.Transformer:
    return responsive(af.Transformer(presets.gpt2(depth=2, width=16, heads=2, vocab=31)).eval())


def test_more_requests_than_rows() -> None:
    """Thousands of requests, of which many end while others join; rows and tokens in flight are never too few."""
    model, rng = small_model(), random.Random(0)
    requests = [
        ask(tuple(rng.choices(range(31), k=rng.randint(1, 9))), rng.randint(1, 9), Sampling(), (3, 4, 5))
        for _ in range(3000)
    ]
    arrivals = [Arrival(request, 0, None, False) for request in requests]
    _, reasons = check(model, {}, Limits(pages=1024, prefill_tokens=8192), arrivals, late=True)
    assert set(reasons) == {"stop", "length"}
