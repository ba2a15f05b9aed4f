"""Several models by name, and LoRA adapters on one body: each request is answered by its own weights."""

import asyncio
import copy
from collections.abc import Sequence
from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings, strategies as st

import anyformer as af
from anyformer.config import LoRA
from anyformer.generation.engine.interface import Limits, Token, UnknownModel, WholeAnswer
from anyformer.generation.request import Request
from anyformer.generation.score import score
from tests import loop
from tests.serve.mixed_requests import ask
from tests.serve.responsive import decoder


def adapted(body: af.Transformer, seed: int) -> af.Transformer:
    """The body with random adapters."""
    config = body.config.model_copy(update={"adapter": LoRA(rank=2)})
    model = af.Transformer(config).to(next(body.parameters()).dtype)
    model.load_state_dict(body.state_dict(), strict=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora." in name:
                parameter.normal_()
    return model.eval()


def expected(model: af.Transformer, ids: tuple[int, ...]) -> list[int]:
    return af.generate(model, torch.tensor([ids]), max_new_tokens=6)[0, len(ids) :].tolist()


async def answers(engine: af.Engine, requests: list[tuple[Request, str]]) -> list[list[int]]:
    async def one(request: Request, model: str) -> list[int]:
        return [event.id async for event in engine.submit(request, model) if isinstance(event, Token)]

    async with engine:
        return await asyncio.gather(*(one(*request) for request in requests))


def test_models_and_adapters_by_name():
    body, other, ids = decoder(1), decoder(2), tuple(range(1, 9))
    first, second = adapted(body, 3), adapted(body, 4)
    wanted = [expected(model, ids) for model in (body, first, second, other)]
    engine = af.Engine(
        {"one": body, "two": other}, Limits(page_size=2), {"one": {"a": copy.deepcopy(first), "b": second}}
    )
    assert engine.models["one"].adapters == ("a", "b")
    requests = [(ask(ids, 6, adapter=name), "one") for name in (None, "a", "b")] + [(ask(ids, 6), "two")]
    assert loop.run(answers(engine, requests * 3)) == wanted * 3
    assert second.table(second.target).data_ptr() == body.table(body.target).data_ptr(), "the body is in memory once"


def count_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids are the same at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 1), st.integers(0, 9)), max_size=8))
def test_pages_are_reused_by_the_same_weights_only(drawn: list[tuple[str | None, int, int]]):
    """One request after the other: each finds the pages of those that begin alike and had the same adapter."""
    body, size = decoder(), 2
    models = {None: body, "a": adapted(body, 3), "b": adapted(body, 4)}
    requests = [ask((first, *range(1, 9), last), 3, top=0, adapter=name) for name, first, last in drawn]

    async def answers() -> list[WholeAnswer]:
        adapters = {name: copy.deepcopy(model) for name, model in models.items() if name}
        async with af.Engine({"model": body}, Limits(page_size=size), {"model": adapters}) as engine:
            return [await engine.complete(one) for one in requests]

    read: dict[str | None, list[list[int]]] = {name: [] for name in models}
    for request, found in zip(requests, loop.run(answers()), strict=True):
        ids = request.ids[0].tolist()
        earlier = [count_common(ids[:-1], other) for other in read[request.adapter]]
        assert found.end.cached_tokens == max(earlier, default=0) // size * size
        read[request.adapter].append([*ids, *found.ids[:-1]])
        (expected,) = score(models[request.adapter], [[*ids, *found.ids]])
        assert [token.logprob for token in found.tokens] == pytest.approx(expected[-3:].tolist(), abs=1e-5)


def test_wrong_adapters_are_refused():
    body = decoder(1)
    with pytest.raises(af.ConfigError, match="adapts other weights"):
        af.Engine({"m": body}, adapters={"m": {"a": adapted(decoder(2), 0)}})
    with pytest.raises(af.ConfigError, match="has no LoRA adapter"):
        af.Engine({"m": body}, adapters={"m": {"a": decoder(1)}})
    with pytest.raises(UnknownModel, match="known: m"):
        af.Engine({"m": body}, adapters={"n": {}})
