"""The engine on a GPU: requests of all kinds, busy and alone."""

import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from anyformer.generation.engine.interface import Limits
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam, Sampling
from tests import loop
from tests.serve.mixed_requests import BUSY, MODELS, PAIR, VOCAB, answer_all, answer_each, ask, build, draw_all

COUNT = 200  # requests of each model
# few pages, so that requests wait for them; small chunks, so that prompts are read in several
REPRODUCIBLE = Limits(
    max_rows=16, page_size=4, pages=100, chunk=8, max_prompt=40, max_new_tokens=32, reproducible=True
)  # fmt: skip


def with_log_probabilities(requests: list[Request]) -> list[Request]:
    return [one if isinstance(one.strategy, Beam) else replace(one, top=2) for one in requests]


@pytest.mark.parametrize("name", MODELS)
def test_reproducible_answers_do_not_depend_on_other_requests(name: str, measured: Callable[..., None]):
    """Tokens, log-probabilities and scores of beams are bit-equal alone, without reuse, and among 200 others."""
    model, requests = build(name, "cuda", torch.bfloat16), draw_all(name, COUNT)
    # the first half is read one step late where it can be, the second has log-probabilities
    requests = [*requests[: COUNT // 2], *with_log_probabilities(requests[COUNT // 2 :])]
    begin = time.perf_counter()
    alone = loop.run(answer_each(model, requests, REPRODUCIBLE.model_copy(update={"reuse": False})))
    middle = time.perf_counter()
    busy, stats = loop.run(answer_all(model, requests, REPRODUCIBLE))
    measured(alone_s=middle - begin, busy_s=time.perf_counter() - middle, cached_tokens=stats.cached_tokens)
    for request, expected, found in zip(requests, alone, busy, strict=True):
        assert found == expected, request
    assert not stats.preemptions
    assert stats.cached_tokens or model.encoder is not None


@pytest.mark.parametrize("name", MODELS)
def test_late_tokens_do_not_depend_on_other_requests(name: str):
    """The same for requests that all decode one step ahead of the host."""
    model, requests = build(name, "cuda", torch.bfloat16), draw_all(name, COUNT // 5, late=True)
    requests = [one for one in requests if one.strategy == Sampling() or one.strategy.temperature]
    alone = loop.run(answer_each(model, requests, REPRODUCIBLE.model_copy(update={"reuse": False})))
    assert loop.run(answer_all(model, requests, REPRODUCIBLE))[0] == alone


@pytest.mark.parametrize("name", MODELS)
def test_preempted_requests(name: str):
    """In fp32 with few pages, requests are preempted and read again; the tokens are those of each request alone."""
    model = build(name, "cuda")
    long = [ask((12 + i, 13, 14 + i), 48) for i in range(12)]  # each takes a third of the pages or more
    requests = [*long, *draw_all(name, 30)]
    limits = PAIR if model.encoder else BUSY
    alone = loop.run(answer_each(model, requests, limits.model_copy(update={"reuse": False, "pages": 200})))
    busy, stats = loop.run(answer_all(model, requests, limits))
    assert stats.preemptions
    for request, expected, found in zip(requests, alone, busy, strict=True):
        if isinstance(request.strategy, Beam):
            assert [one.ids for one in found] == [one.ids for one in expected]
        else:
            assert [token.id for token in found] == [token.id for token in expected], request


@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_all_shapes(name: str):
    """Every request is answered in full, whatever shapes its steps have."""
    model, rng = build(name, "cuda", torch.bfloat16), random.Random(2)
    requests = [
        ask(tuple(rng.randrange(10, VOCAB) for _ in range(rng.randint(1, 100))), rng.randint(1, 32)) for _ in range(40)
    ]
    limits = Limits(max_rows=16, page_size=16, pages=128, chunk=64)
    for request, found in zip(requests, loop.run(answer_all(model, requests, limits))[0], strict=True):
        assert len(found) == request.max_new_tokens
