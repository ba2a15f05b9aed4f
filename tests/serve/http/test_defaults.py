"""Defaults of generation of a run hold over HTTP where a request does not give the option."""

from dataclasses import replace

from anyformer.serve.engine import Engine
from anyformer.tasks.generation_defaults import GenerationDefaults
from tests.explore import made
from tests.serve.http.served import serving_engine


def test_defaults_of_a_run() -> None:
    run = replace(made.made("bytes"), defaults=GenerationDefaults(temperature=0.6, top_k=3, repetition_penalty=1.2))
    with serving_engine(Engine({"bytes": run})) as server:

        def text(**options: object) -> str:
            return str(server.ok("/v1/completions", prompt="the fox", max_tokens=9, **options)["choices"][0]["text"])

        plain = {"temperature": 0.6, "top_k": 3, "repetition_penalty": 1.2}
        assert text(seed=5) == text(seed=5, **plain)
        assert text(seed=5, temperature=1.5) == text(seed=5, **plain | {"temperature": 1.5})
        assert text(temperature=0) == run.generate(["the fox"], temperature=0.0, max_new_tokens=9)[0]
