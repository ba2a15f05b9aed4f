"""Texts of several requests are read together, and each result is that of the task alone."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

import anyformer as af
from anyformer.config import ConfigError
from anyformer.generation.engine.interface import Limits, Unsupported
from anyformer.recipe import Encoder, Prompt
from anyformer.runs.run import Run
from anyformer.tasks.imported_encoder import Encoding
from tests import loop
from tests.explore import made

TEXTS = ["the cat sat", "a dog", "the mat is on the dog and the cat sat on it", "cat"]


async def encode(name: str, kind: str, texts: list[str], **options):
    run = made.made(name, Path("nowhere"))
    async with af.Engine(run, Limits(encode_tokens=24)) as engine:
        parts = await asyncio.gather(*(engine.encode(kind, [text], **options) for text in texts))
        return run, [part[0] for part in parts]


def test_vectors():
    run, found = loop.run(encode("embed", "embed", TEXTS))
    for vector, expected in zip(found, map(json.loads, run.predict(TEXTS)), strict=True):
        assert vector.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["classify", "several"])
def test_labels(name: str):
    run, found = loop.run(encode(name, "classify", TEXTS))
    for item, expected in zip(found, run.predict(TEXTS), strict=True):
        if name == "classify":
            assert max(item, key=lambda pair: pair[1])[0] == expected
            assert sum(p for _, p in item) == pytest.approx(1)
        else:
            assert run.spec.separator.join(label for label, p in item if p > 0.5) == expected


def test_numbers():
    pairs = [f"{a}\t{b}" for a in TEXTS[:2] for b in TEXTS[:2]]
    run, found = loop.run(encode("regress", "number", pairs if made.RUNS["regress"][0].pairs else TEXTS))
    expected = run.predict(pairs if run.spec.pairs else TEXTS)
    assert found == pytest.approx(list(map(float, expected)), rel=1e-4)


def test_tags():
    run, found = loop.run(encode("tag", "tag", TEXTS))
    for text, item, expected in zip(TEXTS, found, run.predict(TEXTS), strict=True):
        assert [word for word, _, _ in item] == text.split()
        assert " ".join(tag for _, tag, _ in item) == expected


def test_masks():
    texts = [text.replace("cat", "<mask>") for text in TEXTS if "cat" in text]
    run, found = loop.run(encode("mlm", "fill_mask", texts, k=3))
    for text, item in zip(texts, found, strict=True):
        expected = run.alternatives(text, 3)
        assert [id for id, _, _ in item[0]] == [one.id for one in expected]
        assert [p for _, _, p in item[0]] == pytest.approx([one.probability for one in expected], abs=1e-5)


def test_scores():
    run, found = loop.run(encode("lm", "score", TEXTS))
    for item, expected in zip(found, run.score(TEXTS), strict=True):
        assert item.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_prompts():
    """A prompt is read before each text of an imported encoder; other models have none."""
    trained = made.made("embed", Path("nowhere"))
    spec = Encoder(prompts=(Prompt(name="query", text="the cat "),))
    run = replace(trained, spec=spec, task=Encoding(spec, trained.tokenizer))

    async def vector(of: Run, **options):
        async with af.Engine(of) as engine:
            return (await engine.encode("embed", [TEXTS[0]], **options))[0].tolist()

    expected = json.loads(run.predict(["the cat " + TEXTS[0]])[0])
    assert loop.run(vector(run, prompt_name="query")) == pytest.approx(expected, abs=1e-5)
    assert loop.run(vector(run)) != pytest.approx(expected, abs=1e-3)
    with pytest.raises(ConfigError, match="did you mean 'query'"):
        loop.run(vector(run, prompt_name="qery"))
    with pytest.raises(Unsupported, match="no prompts"):
        loop.run(vector(trained, prompt_name="query"))


def test_a_kind_that_a_model_does_not_have():
    with pytest.raises(Unsupported, match="cannot embed"):
        loop.run(encode("classify", "embed", TEXTS))
