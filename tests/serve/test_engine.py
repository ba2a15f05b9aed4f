"""The engine's interface: events, cancellation, limits and errors."""

import asyncio

import pytest
import torch

import anyformer as af
from anyformer.generation.beam_search import beam_search
from anyformer.generation.engine.interface import Closing, Finished, Limits, QueueFull, Token, TooLong, UnknownModel
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam, Sampling
from tests import loop
from tests.serve.mixed_requests import ask
from tests.serve.responsive import decoder, pair
from tests.strategies import VOCAB


async def answer(engine: af.Engine, request: Request) -> tuple[list[int], Finished]:
    events = [event async for event in engine.submit(request)]
    end = events.pop()
    assert isinstance(end, Finished)
    return [event.id for event in events if isinstance(event, Token)], end


@pytest.mark.parametrize("make", [decoder, pair])
def test_answers_are_those_of_generate(make):
    model, ids, stop = make(), (3, 4, 5), (7,)
    whole = af.generate(model, torch.tensor([ids]), max_new_tokens=8, stop=stop)[0].tolist()
    expected = whole[len(ids) :] if model.encoder is None else whole[1:]

    async def run():
        async with af.Engine(model) as engine:
            return await answer(engine, ask(ids, 8, stop=stop))

    tokens, end = loop.run(run())
    assert tokens == expected
    assert end.reason == ("stop" if tokens[-1] in stop else "length")
    assert end.prompt_tokens == len(ids)


def test_search_returns_hypotheses():
    model, ids = pair(), (3, 4, 5)
    found = beam_search(model, torch.tensor([ids]), beams=3, n_best=2, max_new_tokens=5, stop=(7,))

    async def run():
        async with af.Engine(model) as engine:
            return await engine.search(ask(ids, 5, Beam(beams=3, n_best=2), stop=(7,)), n_best=2)

    for n, hypothesis in enumerate(loop.run(run())):
        assert hypothesis.ids == tuple(found.ids[0, n, 1 : 1 + int(found.lengths[0, n])].tolist())
        assert hypothesis.score == pytest.approx(float(found.scores[0, n]), abs=1e-5)


@pytest.mark.parametrize("cache", ["auto", "none"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_search_with_one_beam_is_greedy(penalty: float, cache: str):
    model = pair()
    sources = [(3, 4, 5), (6,), (2, 7, 7, 2, 5, 3), (9, 8)]

    async def run():
        async with af.Engine(model, Limits(cache=cache)) as engine:
            strategy = Beam(beams=1, length_penalty=penalty)
            return await asyncio.gather(*(engine.search(ask(ids, 6, strategy, stop=(7, 2))) for ids in sources))

    for ids, (hypothesis,) in zip(sources, loop.run(run()), strict=True):
        found = beam_search(model, torch.tensor([ids]), beams=1, length_penalty=penalty, max_new_tokens=6, stop=(7, 2))
        assert hypothesis.ids == tuple(found.ids[0, 0, 1 : 1 + int(found.lengths[0, 0])].tolist())
        assert hypothesis.score == pytest.approx(float(found.scores[0, 0]), abs=1e-5)


def test_closing_an_iterator_cancels_the_request():
    async def run():
        async with af.Engine(decoder()) as engine:
            events = engine.submit(ask((1, 2), 10_000))
            await anext(events)
            await events.aclose()
            while engine.stats()["model"].running:
                await asyncio.sleep(0.01)
            return engine.stats()["model"]

    stats = loop.run(run())
    assert stats.finished == {"cancelled": 1}
    assert stats.waiting == 0


def test_refusals():
    async def run():
        engine = af.Engine(decoder(), Limits(queue=1, max_prompt=4))
        with pytest.raises(Closing, match="not been started"):
            engine.submit(ask((1,), 1))
        engine.start()
        with pytest.raises(TooLong, match="prompt has 5 tokens"):
            engine.submit(ask((1,) * 5, 1))
        with pytest.raises(UnknownModel, match="known: model"):
            engine.submit(ask((1,), 1), model="other")
        with pytest.raises(af.ConfigError, match="seed"):
            engine.submit(ask((1,), 1, Sampling(), seed=3))
        with pytest.raises(Exception, match=f"vocabulary has {VOCAB}"):
            engine.submit(ask((99,), 1))

        def fill() -> None:
            for _ in range(50):
                engine.submit(ask((1,), 10_000))

        with pytest.raises(QueueFull):
            fill()
        await engine.close(drain=False)
        with pytest.raises(Closing, match="shutting down"):
            engine.submit(ask((1,), 1))

    loop.run(run())
