"""/v1/completions: equal to `run.generate`, in all forms of prompts and options."""

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.serve.http.served import Server

PATH = "/v1/completions"
PROMPTS = ["the fox", "over the lazy dog", "t"]


def streamed(server: Server, path: str = PATH, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a streamed response, which must end with [DONE]."""
    with server.client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("model", ["lm", "pair", "cells"])
def test_greedy_answers_are_those_of_the_run(server: Server, model: str) -> None:
    expected = server.run(model).generate(PROMPTS, max_new_tokens=8)
    found = server.ok(PATH, model=model, prompt=PROMPTS, max_tokens=8, temperature=0)
    assert [choice["text"] for choice in found["choices"]] == expected
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]


def test_sampled_answers_are_those_of_the_run(server: Server) -> None:
    expected = server.run("lm").generate(["the fox"] * 3, max_new_tokens=8, temperature=0.9, top_k=9, seed=[7, 8, 9])
    found = server.ok(PATH, model="lm", prompt="the fox", max_tokens=8, temperature=0.9, top_k=9, seed=7, n=3)
    assert [choice["text"] for choice in found["choices"]] == expected


def test_ids_and_texts_are_the_same_prompt(server: Server) -> None:
    rows = [server.run("lm").tokenizer.encode(text) for text in PROMPTS]
    server.ok(PATH, model="lm", prompt=PROMPTS, temperature=0)  # from here on, the prompts are in the cache
    by_text = server.ok(PATH, model="lm", prompt=PROMPTS, temperature=0)
    by_ids = server.ok(PATH, model="lm", prompt=rows, temperature=0)
    one = server.ok(PATH, model="lm", prompt=rows[0], temperature=0)
    assert by_text["choices"] == by_ids["choices"]
    assert one["choices"] == by_text["choices"][:1]
    assert by_text["usage"] == by_ids["usage"]


def test_a_stream_is_the_answer_in_pieces(server: Server) -> None:
    body = {"model": "lm", "prompt": PROMPTS, "n": 2, "seed": 3, "max_tokens": 9}
    whole = server.ok(PATH, **body)
    chunks = streamed(server, **body, stream_options={"include_usage": True})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    texts, ends = [""] * 6, [None] * 6
    for choice in (chunk["choices"][0] for chunk in chunks[:-1]):
        assert ends[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert ends == [choice["finish_reason"] for choice in whole["choices"]]
    assert "usage" not in streamed(server, **body)[0]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_stop_text_cuts_exactly_where_it_begins(server: Server, data: st.DataObject) -> None:
    body = {"model": "lm", "prompt": "the fox", "max_tokens": 20, "seed": 5}
    whole = server.ok(PATH, **body)["choices"][0]["text"]
    begin = data.draw(st.integers(0, len(whole) - 1))
    stops = [whole[begin : begin + data.draw(st.integers(1, 4))], "never there"]
    at, stop = min((whole.find(stop) + len(stop), stop) for stop in stops if stop in whole)
    found = server.ok(PATH, **body, stop=stops)["choices"][0]
    assert found["text"] == whole[: at - len(stop)]
    assert found["finish_reason"] == "stop"
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed(server, **body, stop=stops)) == found["text"]


def test_echo_repeats_the_prompt(server: Server) -> None:
    plain = server.ok(PATH, model="lm", prompt="the fox", temperature=0)["choices"][0]["text"]
    assert server.ok(PATH, model="lm", prompt="the fox", temperature=0, echo=True)["choices"][0]["text"] == (
        "the fox" + plain
    )
    chunks = streamed(server, model="lm", prompt="the fox", temperature=0, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the fox" + plain


def test_bias_and_penalties(server: Server) -> None:
    run = server.run("lm")
    (q,) = run.tokenizer.encode("q")
    forced = server.ok(PATH, model="lm", prompt="the", max_tokens=5, temperature=0, logit_bias={str(q): 100})
    assert forced["choices"][0]["text"] == "qqqqq"
    for options in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 5.0}):
        expected = run.generate(["the"], max_new_tokens=20, **options)
        assert (
            server.ok(PATH, model="lm", prompt="the", max_tokens=20, temperature=0, **options)["choices"][0]["text"]
            == (expected[0])
        )


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"99999": 1.0}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": [1, "a"]}, None),
        ({"prompt": []}, None),
        ({"prompt": [10**6]}, None),
        ({"max_tokens": 10**6}, None),
    ],
)
def test_wrong_fields_are_refused_by_name(server: Server, wrong: dict[str, Any], param: str | None) -> None:
    error = server.refused(PATH, **{"model": "lm", "prompt": "the", **wrong})
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]


def test_models_that_do_not_write(server: Server) -> None:
    assert server.refused(PATH, 404, model="lmm", prompt="a")["code"] == "model_not_found"
    assert "did you mean 'lm'" in server.refused(PATH, 404, model="lmm", prompt="a")["message"]
    server.refused(PATH, model="tag", prompt="a")
    server.refused(PATH, prompt="a")  # several models
    assert (
        "chat template"
        in server.refused("/v1/chat/completions", model="lm", messages=[{"role": "user", "content": "a"}])["message"]
    )
