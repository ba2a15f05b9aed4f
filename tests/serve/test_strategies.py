"""The engine answers by every strategy, for every shape of model and its adapters, as `strategy.run` does."""

import asyncio
import copy
from collections.abc import Callable

import pytest
import torch

import anyformer as af
from anyformer.config import Block, NoPosition, Recurrent, Stack
from anyformer.generation.engine.interface import Finished, Unsupported
from anyformer.generation.strategy import Beam, Contrastive, Draft, Lookup, OwnHead, Sampling, Speculation, Strategy
from tests import loop
from tests.serve.mixed_requests import ask
from tests.serve.responsive import decoder, pair
from tests.serve.test_adapters import adapted

STOP = (7,)
PROMPTS = [(3, 4, 5), (6, 2), (9, 8, 1, 3, 4, 5, 3, 4)]


def recurrent() -> af.Transformer:
    return decoder(decoder=Stack(depth=2, blocks=(Block(mixer=Recurrent(cell="gru")),), position=NoPosition()))


def strategies(model: af.Transformer) -> list[Strategy]:
    draft = pair(3) if model.encoder is not None else decoder(3)
    found: list[Strategy] = [Sampling(), Beam(beams=3), Contrastive(candidates=3)]
    drafts = (
        [Lookup(ngram=2)] if model.config.decoder == recurrent().config.decoder else [Lookup(ngram=2), Draft(draft)]
    )
    return found + [Speculation(draft=one, ahead=3) for one in drafts]


@pytest.mark.parametrize("make", [decoder, pair, recurrent])
def test_every_strategy(make: Callable[[], af.Transformer]) -> None:
    """Requests of all strategies, for the body and for an adapter of it, that arrive together."""
    body = make()
    models = {None: body, "a": adapted(body, 3)}
    asked = [ask(ids, 8, one, STOP, adapter=name) for one in strategies(body) for ids in PROMPTS for name in models]

    async def run() -> list[list[int]]:
        async with af.Engine({"m": body}, adapters={"m": {"a": copy.deepcopy(models["a"])}}) as engine:
            found = [one.ids for one in await asyncio.gather(*map(engine.complete, asked))]
            for one, ids in zip(asked, found, strict=True):
                if isinstance(one.strategy, Beam):
                    assert list((await engine.search(one))[0].ids) == ids
                    events = [event async for event in engine.submit(one)]
                    assert [event.id for event in events[:-1]] == ids
                    assert events[-1].reason == ("stop" if ids[-1] in STOP else "length")
            return found

    for request, found in zip(asked, loop.run(run()), strict=True):
        answer = request.strategy.run(models[request.adapter], ask(request.ids[0].tolist(), 8, stop=STOP))
        expected = answer[0, 1 if body.encoder is not None else request.ids.shape[1] :].tolist()
        assert found == expected[: len(found)], request
        assert len(found) == 8 or found[-1] in STOP, request


@pytest.mark.parametrize("strategy", [Contrastive(candidates=2), Speculation(draft=Lookup(ngram=2))])
def test_others_are_answered_between_the_steps_of_a_strategy(strategy: Strategy) -> None:
    async def run() -> bool:
        async with af.Engine(decoder()) as engine:
            long = asyncio.create_task(engine.complete(ask((3, 4, 5), 100, strategy)))
            await engine.complete(ask((6, 2), 3))
            before = not long.done()
            assert len((await long).ids) == 100
            return before

    assert loop.run(run())


def test_a_strategy_that_does_not_fit_a_model_fails_alone() -> None:
    async def run() -> list[Finished]:
        async with af.Engine(decoder()) as engine:
            with pytest.raises(af.ConfigError, match="no layers for further tokens"):
                await engine.complete(ask((3, 4), 4, Speculation(draft=OwnHead())))
            wrong = ask((3, 4), 4, Speculation(draft=Draft(pair(3))))
            return [(await engine.complete(one)).end for one in (wrong, ask((3, 4), 4, Contrastive(candidates=2)))]

    bad, good = loop.run(run())
    assert bad.reason == "error"
    assert "draft: is encoder-decoder" in bad.message
    assert good.reason == "length"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"segments": torch.zeros(1, 2, dtype=torch.long)}, "segments"),
        ({"chunk": 2}, "chunk"),
        ({"processors": [lambda history, logits: logits]}, "processors"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, object], named: str) -> None:
    async def run() -> None:
        async with af.Engine(decoder()) as engine:
            await engine.complete(ask((3, 4), 2, **options))

    with pytest.raises(Unsupported, match=f"{named} is not served"):
        loop.run(run())
    for given in ({"top": 1}, {"prompt_logprobs": True}, {"adapter": "a"}):
        with pytest.raises(af.ConfigError, match="is for requests to an engine"):
            Sampling().run(decoder(), ask((3, 4), 2, **given))
