"""Options of generation over HTTP change answers as in Python; defaults of a run hold where a request has none."""

from dataclasses import replace
from typing import Any

import pytest

from anyformer.serve.engine import Engine
from anyformer.serve.http.bodies import GenerationBody
from anyformer.tasks.generation_defaults import GenerationDefaults
from tests.serve.http.served import Server, serving_engine
from tests.serve.responsive import make_run

PROMPTS = ["the fox", "a", "over the lazy dog"]


def test_defaults_of_a_run() -> None:
    run = replace(make_run("bytes"), defaults=GenerationDefaults(temperature=0.6, top_k=3, repetition_penalty=1.2))
    with serving_engine(Engine({"bytes": run})) as server:

        def text(**options: object) -> str:
            return str(server.ok("/v1/completions", prompt="the fox", max_tokens=9, **options)["choices"][0]["text"])

        plain = {"temperature": 0.6, "top_k": 3, "repetition_penalty": 1.2}
        assert text(seed=5) == text(seed=5, **plain)
        assert text(seed=5, temperature=1.5) == text(seed=5, **plain | {"temperature": 1.5})
        assert text(temperature=0) == run.generate(["the fox"], temperature=0.0, max_new_tokens=9)[0]


OPTIONS = {  # of sampling: one value of each that changes answers
    "temperature": 0.3,
    "top_p": 0.4,
    "top_k": 2,
    "min_p": 0.4,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 3.0,
    "seed": 8,
}
OTHERS = {"model", "n", "logit_bias", "stop", "ignore_eos", "stream", "stream_options"}
CONSTRAINTS = {"response_format", "structured_outputs"}


def test_no_option_is_missing() -> None:
    assert set(GenerationBody.model_fields) == {*OPTIONS, *OTHERS, *CONSTRAINTS}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_each_option_changes_answers_as_in_python(server: Server, endpoint: str, option: str) -> None:
    run, common = server.run("chat"), {"temperature": 0.7, "seed": 7}
    options = common | {option: OPTIONS[option]}

    def over_http(text: str) -> str:
        sent = {"model": "chat", "max_tokens": 24, **options}
        if endpoint == "completions":
            return str(server.ok("/v1/completions", prompt=text, **sent)["choices"][0]["text"])
        messages = [{"role": "user", "content": text}]
        return str(server.ok("/v1/chat/completions", messages=messages, **sent)["choices"][0]["message"]["content"])

    def in_python(text: str, options: dict[str, Any]) -> str:
        if endpoint == "completions":
            return run.generate([text], max_new_tokens=24, **options)[0]
        return "".join(run.chat().reply(text, max_new_tokens=24, **options))

    found = list(map(over_http, PROMPTS))
    assert found == [in_python(text, options) for text in PROMPTS]
    assert found != [in_python(text, common) for text in PROMPTS]
