"""Options of generation over HTTP change answers as in Python; defaults of a run hold where a request has none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anyformer.config import ConfigError
from anyformer.generation.engine.engine import Engine
from anyformer.generation.http.bodies import ELSEWHERE, GenerationBody, http_names, with_options
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
SEARCHES: list[dict[str, Any]] = [  # options of other strategies
    {"beams": 3, "length_penalty": -2.0, "early_stopping": "never"},
    {"beams": 4, "groups": 2, "diversity_penalty": 2.0},
    {"candidates": 4, "alpha": 0.9},
    {"lookup": 2, "ahead": 2, "temperature": 0.7, "seed": 3},
    {"self_draft": True},
]
FIELDS = {name: field for field, (name, _) in http_names().items()}


def test_no_option_is_missing() -> None:
    table = {name: one for name, one in options().items() if one.owner in (Strategy, Sampling)}
    assert {name for name, one in table.items() if not (one.filter and one.filter.in_ids)} == OPTIONS.keys()
    others = {name for name, one in options().items() if one.owner not in (Strategy, Sampling)}
    assert others == {*(name for one in SEARCHES for name in one), "draft", "n_best"} - {"temperature", "seed"}
    fields = {FIELDS.get(name, name) for name in OPTIONS} | others - set(ELSEWHERE)
    assert set(with_options(GenerationBody).model_fields) == {*fields, *OTHERS, *CONSTRAINTS}


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


@pytest.mark.parametrize("given", SEARCHES[:-1], ids=str)
@pytest.mark.parametrize("name", ["lm", "pair", "cells"])
def test_searches_find_what_they_find_in_python(server: Server, name: str, given: dict[str, Any]) -> None:
    run = server.run(name)
    for text in PROMPTS:
        found = server.ok("/v1/completions", model=name, prompt=text, max_tokens=NEW, **given)["choices"]
        assert [one["text"] for one in found] == run.generate([text], max_new_tokens=NEW, **given)
        chosen = {"structured_outputs": {"choice": ["the fox", "dog"]}}
        if name != "cells":
            found = server.ok("/v1/completions", model=name, prompt=text, max_tokens=NEW, **given, **chosen)["choices"]
            assert found[0]["text"] == run.generate([text], max_new_tokens=NEW, choices=["the fox", "dog"], **given)[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beams": 2, "candidates": 2}, "beams: belongs to beam search, and candidates to contrastive search"),
        ({"beams": 2, "temperature": 0.5}, "temperature = 0.5: beam search does not sample"),
        ({"alpha": 0.5, "top_p": 0.5}, "top_p = 0.5: contrastive search does not sample"),
        ({"length_penalty": 1.0}, "length_penalty = 1.0: needs beams"),
        ({"beams": 0}, "beams = 0: must be at least 1"),
        ({"beams": 10**6}, "beams = 1000000: the engine allows at most"),
        ({"candidates": 10**6}, "candidates = 1000000: the vocabulary has"),
        ({"lookup": 2, "ahead": 10**9}, "ahead = 1000000000: the engine allows at most"),
        ({"beams": 2, "stream": True}, "stream: beam search finds one whole answer"),
        ({"lookup": 2, "stream": True}, "stream: speculation finds one whole answer"),
        ({"beams": 2, "n": 2}, "n: beam search finds one whole answer"),
        ({"beams": 2, "stop": ["a"]}, "stop: is not for beam search"),
        ({"beams": 2, "logprobs": 1}, "log-probabilities are of sampled answers"),
        ({"self_draft": True}, "self_draft: the model has no layers for further tokens"),
        ({"draft": "lm"}, "draft: belongs to speculation"),
        ({"n_best": 2}, "n_best: belongs to beam search"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_a_search_are_refused_by_name(
    server: Server, wrong: dict[str, Any], message: str
) -> None:
    error = server.refused("/v1/completions", model="lm", prompt="the", max_tokens=9, **wrong)
    assert error["message"].startswith(message)


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
