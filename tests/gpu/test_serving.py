"""A reproducible engine on a GPU: answers and log-probabilities are bit-equal for any other requests."""

import asyncio
import random

import pytest
import torch

import anyformer as af
from anyformer import presets
from anyformer.decoding.strategy import Sampling
from anyformer.serve.request import Generation, Limits

VOCAB = 500
SIZES = {"depth": 2, "width": 256, "heads": 4, "vocab": VOCAB}
MODELS = {"llama": lambda: presets.llama(**SIZES, kv_heads=2), "marian": lambda: presets.vaswani(**SIZES)}
LIMITS = Limits(
    max_rows=16, page_size=16, pages=512, chunk=64, max_prompt=128, max_new_tokens=32, reproducible=True
)  # fmt: skip


def draw(rng: random.Random, top: int | None) -> Generation:
    ids = tuple(rng.randrange(5, VOCAB) for _ in range(rng.randint(1, 100)))
    if rng.random() < 0.5:
        return Generation(
            ids, rng.randint(1, 32), Sampling(temperature=0.8, top_p=0.9), seed=rng.randrange(99), top=top
        )
    return Generation(ids, rng.randint(1, 32), Sampling(), top=top)


async def answers(model: af.Transformer, requests: list[Generation], at_once: bool, limits: Limits) -> list:
    async def one(generation: Generation) -> list:
        return [event async for event in engine.submit(generation)]

    async with af.Engine(model, limits) as engine:
        if at_once:
            return await asyncio.gather(*map(one, requests))
        return [await one(request) for request in requests]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("top", [None, 2], ids=["read late", "log-probabilities"])
def test_answers_do_not_depend_on_other_requests(name: str, top: int | None):
    torch.manual_seed(0)
    model = af.Transformer(MODELS[name]()).to("cuda", torch.bfloat16).eval()
    rng = random.Random(1)
    requests = [draw(rng, top) for _ in range(24)]
    alone = asyncio.run(answers(model, requests, False, LIMITS.model_copy(update={"reuse": False})))
    busy = asyncio.run(answers(model, requests, True, LIMITS))
    assert [[*tokens] for *tokens, _ in busy] == [[*tokens] for *tokens, _ in alone]


@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_all_shapes(name: str):
    """Every request is answered in full, whatever shapes its steps have."""
    torch.manual_seed(0)
    model = af.Transformer(MODELS[name]()).to("cuda", torch.bfloat16).eval()
    rng = random.Random(2)
    requests = [draw(rng, None) for _ in range(40)]
    limits = LIMITS.model_copy(update={"reproducible": False, "pages": 128})
    for request, (*tokens, end) in zip(requests, asyncio.run(answers(model, requests, True, limits)), strict=True):
        assert end.reason == "length", end.message
        assert len(tokens) == request.max_new_tokens
