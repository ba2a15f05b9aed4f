"""Requests of mixed kinds in a busy engine are answered as if each were alone."""

import pytest

import anyformer as af
from anyformer.generation.beam_search import run_beam_search
from anyformer.generation.engine.beams import hypotheses
from anyformer.generation.engine.interface import Limits
from anyformer.generation.engine.stats import Stats
from anyformer.generation.generate import run_sampling
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam
from tests import loop
from tests.serve.mixed_requests import BUSY, MODELS, PAIR, answer_all, ask, build, draw_all


def alone(model: af.Transformer, request: Request):
    if isinstance(request.strategy, Beam):
        return hypotheses(run_beam_search(model, request))
    ids = run_sampling(model, request)[0].tolist()
    answer = ids[1 if model.encoder is not None else request.ids.shape[1] :]
    ends = [i for i, id in enumerate(answer) if id in request.stop]
    return answer[: ends[0] + 1] if ends else answer


def check(name: str, count: int, limits: Limits) -> Stats:
    model, requests = build(name), draw_all(name, count)
    answers, stats = loop.run(answer_all(model, requests, limits))
    for request, answer in zip(requests, answers, strict=True):
        expected = alone(model, request)
        if isinstance(request.strategy, Beam):
            assert [h.ids for h in answer] == [h.ids for h in expected]
            assert [h.score for h in answer] == pytest.approx([h.score for h in expected], abs=1e-4)
        else:
            assert [token.id for token in answer] == expected, request
    return stats


@pytest.mark.parametrize("name", MODELS)
def test_answers_do_not_depend_on_other_requests(name: str):
    check(name, 16, PAIR if build(name).encoder else BUSY)


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
def test_requests_that_run_out_of_pages(late: bool):
    """Six answers of 11 pages in a cache of 23: some give their pages back, and are read again."""
    model = build("llama")
    requests = [ask((2 + i, 3, 4 + i), 40) for i in range(6)]
    answers, stats = loop.run(answer_all(model, requests, BUSY.model_copy(update={"pages": 24}), late))
    assert stats.preemptions
    assert [[token.id for token in answer] for answer in answers] == [alone(model, request) for request in requests]


@pytest.mark.system
@pytest.mark.parametrize("name", MODELS)
def test_fifty_requests_each(name: str):
    stats = check(name, 50, PAIR if build(name).encoder else BUSY)
    assert stats.cached_tokens or build(name).encoder is not None


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("pages", [200, 40])
def test_reproducible_engine(name: str, pages: int):
    """It never reads tokens of an answer again, also where pages are few: they would be rounded differently."""
    limits = BUSY.model_copy(update={"reproducible": True, "pages": pages, "max_prompt": 40, "max_new_tokens": 30})
    assert not check(name, 10 if pages == 200 else 30, limits).preemptions
