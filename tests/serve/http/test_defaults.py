"""Options of generation over HTTP change answers as in Python; defaults of a run hold where a request has none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anyformer.config import ConfigError
from anyformer.generation.engine.engine import Engine
from anyformer.generation.http.bodies import GenerationBody, http_names, with_filters
from anyformer.generation.strategy import Sampling, Strategy, options
from anyformer.runs.run import write_folder, write_model
from anyformer.tasks.base import ending_ids
from anyformer.tasks.generation_defaults import GenerationDefaults
from tests.serve.http.served import Server, serving_engine
from tests.serve.responsive import make_run
from tests.test_cli import refused
from tests.test_cli_decoding import flags

PROMPTS, NEW = ["the fox", "over the lazy dog"], 20


def test_defaults_of_a_run() -> None:
    run = replace(make_run("bytes"), defaults=GenerationDefaults(temperature=0.6, top_k=3, repetition_penalty=1.2))
    with serving_engine(Engine({"bytes": run})) as server:

        def text(**options: object) -> str:
            return str(server.ok("/v1/completions", prompt="the fox", max_tokens=9, **options)["choices"][0]["text"])

        plain = {"temperature": 0.6, "top_k": 3, "repetition_penalty": 1.2}
        assert text(seed=5) == text(seed=5, **plain)
        assert text(seed=5, temperature=1.5) == text(seed=5, **plain | {"temperature": 1.5})
        assert text(temperature=0) == run.generate(["the fox"], temperature=0.0, max_new_tokens=9)[0]


OPTIONS: dict[str, Any] = {  # of sampling: a value of each that changes answers, and one out of its range
    "temperature": (0.3, -1.0),
    "top_p": (0.4, 1.5),
    "top_k": (2, 0),
    "min_p": (0.4, 2.0),
    "typical_p": (0.2, -0.5),
    "presence_penalty": (-9.0, 1e38),
    "frequency_penalty": (-9.0, -1e38),
    "repetition_penalty": (3.0, 0.0),
    "no_repeat_ngram": (1, -1),
    "min_new_tokens": (NEW, -2),
}
OTHERS = {"model", "n", "logit_bias", "stop", "ignore_eos", "stream", "stream_options", "seed"}
CONSTRAINTS = {"response_format", "structured_outputs"}
FIELDS = {name: field for field, (name, _) in http_names().items()}


def test_no_option_is_missing() -> None:
    table = {name: one for name, one in options().items() if one.owner in (Strategy, Sampling)}
    assert {name for name, one in table.items() if not (one.filter and one.filter.in_ids)} == OPTIONS.keys()
    fields = {FIELDS.get(name, name) for name in OPTIONS}
    assert set(with_filters(GenerationBody).model_fields) == {*fields, *OTHERS, *CONSTRAINTS}


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_range_is_refused_by_the_same_sentence_everywhere(server: Server, endpoint: str, tmp_path: Path) -> None:
    """In Python, on the command line and over HTTP; by Python and the command line all at once."""
    wrong = {name: value for name, (_, value) in OPTIONS.items()}
    with pytest.raises(ConfigError) as caught:
        server.run("chat").generate(["a"], **wrong)
    told = {fault.path: fault.message for fault in caught.value.faults}
    assert told.keys() == wrong.keys()
    for name, value in wrong.items():
        asked = {"messages": [{"role": "user", "content": "a"}]} if "chat" in endpoint else {"prompt": "a"}
        error = server.refused(f"/v1/{endpoint}", model="chat", **asked, **{FIELDS.get(name, name): value})
        assert error["message"] == f"{FIELDS.get(name, name)} {told[name]}"
        assert error["param"] == FIELDS.get(name, name)
    run = server.run("chat")
    write_folder(tmp_path / "run", lambda to: write_model(to, run.model.state_dict(), run.config, run.spec, run.task))
    lines = refused("generate", tmp_path / "run", "--prompt", "a", *flags(wrong))
    assert sorted(lines) == sorted(f"--{name.replace('_', '-')} {message}" for name, message in told.items())


def test_options_of_other_strategies_are_refused_by_name(server: Server) -> None:
    others = {name: one for name, one in options().items() if one.owner not in (Strategy, Sampling)}
    assert {"beams", "alpha", "lookup"} <= others.keys()
    for name, one in others.items():
        error = server.refused("/v1/completions", model="chat", prompt="a", **{name: 1})
        assert error["message"].startswith(f"{name}: belongs to {one.owner.title}")


def test_the_least_number_of_tokens_is_within_the_budget(server: Server) -> None:
    error = server.refused("/v1/completions", model="chat", prompt="a", max_tokens=3, min_tokens=4)
    assert error["message"] == "min_tokens = 4: is more than max_tokens = 3"


@pytest.mark.parametrize("option", [*OPTIONS, "seed"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_each_option_changes_answers_as_in_python(server: Server, endpoint: str, option: str) -> None:
    run, common = server.run("chat"), {"temperature": 0.7, "seed": 7}
    likely = dict.fromkeys(ending_ids(run.tokenizer, run.config), 6.0) if option == "min_new_tokens" else {}
    given = common | {option: 8 if option == "seed" else OPTIONS[option][0]}

    def over_http(text: str) -> str:
        sent: dict[str, Any] = {FIELDS.get(name, name): value for name, value in given.items()}
        sent |= {"model": "chat", "max_tokens": NEW, "logit_bias": {str(id): value for id, value in likely.items()}}
        if endpoint == "completions":
            return str(server.ok("/v1/completions", prompt=text, **sent)["choices"][0]["text"])
        messages = [{"role": "user", "content": text}]
        return str(server.ok("/v1/chat/completions", messages=messages, **sent)["choices"][0]["message"]["content"])

    def in_python(text: str, options: dict[str, Any]) -> str:
        options = {**options, "bias": tuple(likely.items())}
        if endpoint == "completions":
            return run.generate([text], max_new_tokens=NEW, **options)[0]
        return "".join(run.chat().reply(text, max_new_tokens=NEW, **options))

    found = list(map(over_http, PROMPTS))
    assert found == [in_python(text, given) for text in PROMPTS]
    assert found != [in_python(text, common) for text in PROMPTS]
