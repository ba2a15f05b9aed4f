"""Predictions in windows and by continuous batching are those of `run.predict` at once."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from anyformer.config import ConfigError
from anyformer.generation.batch import predictor as predictor_module
from anyformer.generation.batch.predictor import Predictor
from anyformer.generation.engine.interface import Limits
from anyformer.generation.engine.offline import OfflineEngine
from anyformer.runs.run import Run
from tests.explore import made
from tests.test_generate import writer

VOCABULARY = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "0", "1", "2", "3"]


def texts(count: int, mask: str = "") -> list[str]:
    """Random texts of unequal length, some of them blank."""
    rng = random.Random(count)
    found = [" ".join(rng.choices(VOCABULARY, k=rng.randint(1, 9))) for _ in range(count)]
    return ["" if i % 7 == 3 and not mask else f"{text} {mask}".rstrip() for i, text in enumerate(found)]


def predictor_of(run: Run, **options: Any) -> Predictor:
    """A predictor whose run is in memory."""
    found = Predictor("nowhere", **options)
    found.__dict__["_loaded"] = run, options
    return found


def input_of(name: str) -> list[str]:
    spec = made.RUNS[name][0]
    if getattr(spec, "pairs", False) or getattr(spec, "apart", False):
        return [f"{a}\t{a}" for a in texts(20, "fox")]
    return texts(20, {"mlm": "<mask>", "spans": "<extra_id_0>"}.get(spec.kind, ""))


@pytest.mark.parametrize("name", made.RUNS)
def test_windows_are_answered_like_all_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("WINDOW", "ENCODER_WINDOW"):
        monkeypatch.setattr(predictor_module, size, 8)
    run, given = made.made(name, Path("nowhere")), input_of(name)
    how = {"max_new_tokens": 6} if run.spec.kind in ("lm", "prefix_lm") else {}
    if how:
        given = [text or "the" for text in given]
    found, expected = predictor_of(run, **how).predict(given), run.predict(given, **how)
    if run.spec.kind in ("embed", "regress"):
        for a, b in zip(found, expected, strict=True):
            assert json.loads(a or "null") == pytest.approx(json.loads(b or "null"), abs=1e-4)
    else:
        assert found == expected


TIGHT = Limits(max_rows=5, page_size=4, pages=40, prefill_tokens=24, chunk=8)  # preemption and chunked prefill
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3, "top_k": 20},
    "stop": {"stop": ["o", "ab"]},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "min_new_tokens": 4},
    "choices": {"choices": ["yes", "no, never"]},
    "prefix": {"prefix": "ab"},
    "nothing": {"max_new_tokens": 0},
    "beams": {"beams": 3},
    "contrastive": {"candidates": 3, "alpha": 0.4},
    "lookup": {"lookup": 2, "ahead": 2},
    "int8": {"cache": "int8"},
}


@pytest.mark.parametrize("shape", ["lm", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("way", WAYS)
def test_continuous_batching_gives_the_same_answers(shape: str, way: str) -> None:
    run = writer("bytes", shape, ends=True)
    given = [text or "x" for text in texts(12)]
    how = {"max_new_tokens": 12} | WAYS[way]
    engine = OfflineEngine(run.model, TIGHT)
    expected = run.predict(given, **how)
    for late in (False, True):  # the engine is used again, and reads tokens one step late
        if engine._server is not None:
            engine._server.overlaps = late
        assert run.predict(given, backend=engine, **how) == expected


def test_answers_are_decoded_by_pages_where_possible() -> None:
    for name, paged in {"pair": True, "lm": True, "window": True, "prefix": False, "cells": False}.items():
        run = made.made(name, Path("nowhere"))
        engine = OfflineEngine(run.model)
        run.predict(["the fox"], backend=engine, max_new_tokens=3)
        assert (engine._server is not None) == paged, name


def test_a_text_that_does_not_fit_into_the_pages() -> None:
    run = writer("bytes")
    engine = OfflineEngine(run.model, Limits(max_rows=4, page_size=4, pages=4))
    given = ["a", "b" * 30]
    assert run.predict(given, backend=engine, max_new_tokens=9) == run.predict(given, max_new_tokens=9)


def test_seeds_and_faults_count_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_module, "WINDOW", 3)
    run, how = writer("bytes", length=40), {"temperature": 1.0, "seed": 5, "max_new_tokens": 6}
    given = ["the"] * 10
    found = predictor_of(run, **how).predict(given)
    assert found == run.predict(given, **how)
    assert len(set(found)) > 3
    with pytest.raises(ConfigError, match=r"^text 8: has 41 tokens"):
        predictor_of(run).predict([*given[:7], "x" * 41, "a"])
