"""Log-probabilities, poisoned requests, cancellation: what concerns one request alone."""

import asyncio

import pytest
import torch

import anyformer as af
from anyformer.generation.engine.interface import Finished, Limits, Token
from anyformer.generation.request import Request
from anyformer.generation.score import score
from tests import loop
from tests.serve.mixed_requests import ask
from tests.serve.responsive import decoder

LIMITS = Limits(page_size=2, chunk=3, prefill_tokens=6)


async def events(engine: af.Engine, request: Request) -> list:
    return [event async for event in engine.submit(request)]


def test_log_probabilities_are_those_of_score():
    model, ids = decoder(), (3, 1, 4, 1, 5, 9, 2)

    async def run():
        async with af.Engine(model, LIMITS) as engine:
            await events(engine, ask(ids, 2))  # its pages are not used: all of the prompt is scored
            return await events(engine, ask(ids, 4, top=2, prompt_logprobs=True))

    *tokens, end = loop.run(run())
    answer = [token.id for token in tokens]
    expected = score(model, [[*ids, *answer]])[0].tolist()
    assert [token.logprob for token in (*end.prompt_logprobs, *tokens)] == pytest.approx(expected, abs=1e-5)
    assert [token.id for token in end.prompt_logprobs] == list(ids[1:])
    for token in tokens:  # greedy: its own token is the most probable
        assert token.top[0] == (token.id, pytest.approx(token.logprob))
        assert len(token.top) == 2


def test_a_prompt_is_scored_without_an_answer():
    async def run():
        async with af.Engine(decoder(), LIMITS) as engine:
            return await events(engine, ask((3, 1, 4), 0, prompt_logprobs=True))

    (end,) = loop.run(run())
    assert end.reason == "length"
    assert len(end.prompt_logprobs) == 2


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
def test_a_poisoned_request_fails_alone(late: bool):
    """NaN in one embedding: requests with that token fail, before, beside and after others, whose pages stay finite."""
    model, poison, ids = decoder(), 7, (1, 2, 3, 4, 5)
    stop = tuple(range(6, 11))
    whole = af.generate(model, torch.tensor([ids]), max_new_tokens=5, stop=stop)[0, 5:].tolist()
    with torch.no_grad():
        model.target.table.weight[poison] = float("nan")

    async def run():
        engine = af.Engine(model, LIMITS.model_copy(update={"pages": 16}))
        engine._servers["model"].overlaps = late
        async with engine:
            bad = ask((1, 2, poison, 3, 4, 5), 3, stop=stop)
            good = ask(ids, 5, stop=stop)
            found = await asyncio.gather(*(events(engine, one) for one in (bad, good, good, bad) * 4))
            return [*found, await events(engine, good)]

    for *tokens, end in loop.run(run()):
        assert isinstance(end, Finished)
        if end.reason == "error":
            assert not tokens
            assert "not finite" in end.message
        else:
            assert [token.id for token in tokens if isinstance(token, Token)] == whole


def test_a_token_that_poisons_its_own_answer():
    """The embedding of a generated token is NaN: its answer ends there, and others do not."""
    model, ids = decoder(), [(i, 2, 3) for i in range(1, 6)]
    whole = [af.generate(model, torch.tensor([one]), max_new_tokens=8)[0, 3:].tolist() for one in ids]
    poison = next(id for answer in whole for id in answer[:-1] if id > 5)  # in no prompt
    with torch.no_grad():
        model.target.table.weight[poison] = float("nan")

    async def run():
        engine = af.Engine(model, LIMITS)
        engine._servers["model"].overlaps = True
        async with engine:
            found = await asyncio.gather(*(events(engine, ask(one, 8)) for one in ids))
            return found, await asyncio.gather(*(engine.complete(ask(one, 8)) for one in ids))

    streamed, completed = loop.run(run())
    for expected, (*tokens, end), completion in zip(whole, streamed, completed, strict=True):
        known = expected[: expected.index(poison) + 1] if poison in expected[:-1] else expected
        assert [token.id for token in tokens] == completion.ids == known
        assert end.reason == completion.end.reason == ("error" if poison in expected[:-1] else "length")


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
def test_cancelled_requests_leave_no_pages(late: bool):
    async def run():
        engine = af.Engine(decoder(), LIMITS)
        engine._servers["model"].overlaps = late
        async with engine:
            answers = [engine.submit(ask((1, 2, 3, n % 9), 500)) for n in range(12)]
            await asyncio.gather(*(anext(answer) for answer in answers[:6]))
            for answer in answers:
                await answer.aclose()
            while engine.stats()["model"].running or engine.stats()["model"].waiting:
                await asyncio.sleep(0.01)
            return engine.stats()["model"], engine._servers["model"].pages.own.used

    stats, used = loop.run(run())
    assert stats.finished == {"cancelled": 12}
    assert used == 0
