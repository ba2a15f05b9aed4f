"""The `openai` client: sync, async and streaming, over all endpoints of its interface."""

import asyncio
import json
import math
import re
from collections.abc import Iterator

import pytest
import torch

from anyformer.generation.score import score
from tests import loop
from tests.serve.http.served import Server

openai = pytest.importorskip("openai", reason="needs the package openai")


@pytest.fixture
def client(server: Server) -> "Iterator[openai.OpenAI]":
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_models(client: "openai.OpenAI", server: Server) -> None:
    assert [model.id for model in client.models.list()] == list(server.service.runs)
    assert client.models.retrieve("lm").owned_by == "anyformer"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


def test_completions(client: "openai.OpenAI", server: Server) -> None:
    found = client.completions.create(model="lm", prompt=["the fox", "a"], max_tokens=6, temperature=0, n=2)
    expected = server.run("lm").generate(["the fox", "a"], max_new_tokens=6)
    assert [choice.text for choice in found.choices] == [text for text in expected for _ in range(2)]
    assert found.usage.completion_tokens == 24
    stream = client.completions.create(model="lm", prompt="the fox", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0]
    extra = client.completions.create(model="lm", prompt="the fox", max_tokens=3, extra_body={"top_k": 1})
    assert extra.choices[0].text == server.run("lm").generate(["the fox"], max_new_tokens=3)[0]


def test_async(server: Server) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            options = {"model": "lm", "max_tokens": 6, "temperature": 0}
            whole = await asyncio.gather(*(client.completions.create(prompt=p, **options) for p in ("the", "fox", "a")))
            stream = await client.completions.create(
                prompt="the", stream=True, stream_options={"include_usage": True}, **options
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens == 6
            text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
            return [*(one.choices[0].text for one in whole), text]

    expected = server.run("lm").generate(["the", "fox", "a", "the"], max_new_tokens=6)
    assert loop.run(ask()) == expected


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "the <eos>"}, {"type": "text", "text": " fox"}]},
]


def test_chat(client: "openai.OpenAI", server: Server) -> None:
    run = server.run("chat")
    assert run.chat_template is not None
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the <eos> fox"}]
    ids = run.chat_template.encode(plain)
    expected = client.completions.create(model="chat", prompt=ids, max_tokens=12, temperature=0).choices[0].text
    options = {"model": "chat", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
    found = client.chat.completions.create(**options, n=2)
    assert [choice.message.content for choice in found.choices] == [expected] * 2
    assert found.usage.prompt_tokens == len(ids)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == found.choices[0].finish_reason
    assert chunks[-1].usage == found.usage or chunks[-1].usage.prompt_tokens == len(ids)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def test_response_formats(client: "openai.OpenAI") -> None:
    options = {"model": "chat", "messages": MESSAGES, "seed": 1, "max_completion_tokens": 60}
    named = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    for _ in range(3):
        found = client.chat.completions.create(**options, response_format=named).choices[0].message.content
        value = json.loads(found)
        assert value["name"] in ("fox", "dog")
        assert isinstance(value["age"], int)
    anything = client.chat.completions.create(**options, response_format={"type": "json_object"})
    assert isinstance(json.loads(anything.choices[0].message.content), dict)
    free = client.chat.completions.create(**options, response_format={"type": "text"})
    assert free.choices[0].message.content == client.chat.completions.create(**options).choices[0].message.content
    for rules, pattern in (({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[a-c]{2,5}"}, "[a-c]{2,5}")):
        body = {"structured_outputs": rules}
        found = client.chat.completions.create(**options, extra_body=body).choices[0].message.content
        assert re.fullmatch(pattern, found)
        found = client.completions.create(model="chat", prompt="a", max_tokens=9, extra_body=body).choices[0].text
        assert re.fullmatch(pattern, found)


def test_errors(client: "openai.OpenAI") -> None:
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="lm", prompt="a", suffix="b")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nothing", prompt="a")
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model="lm", messages=[{"role": "user", "content": "a"}])


def test_log_likelihoods_are_those_of_score(client: "openai.OpenAI", server: Server) -> None:
    """`score` of a text is the sum of its echoed log-probabilities."""
    run = server.run("lm")
    for text in ("the quick fox", "over the lazy dog", "qq"):
        ids = run.tokenizer.encode(text)
        found = client.completions.create(model="lm", prompt=text, max_tokens=0, echo=True, logprobs=2).choices[0]
        assert found.text == text
        logprobs = found.logprobs
        expected = score(run.model, [ids])[0]
        torch.testing.assert_close(torch.tensor(logprobs.token_logprobs[1:]), expected, atol=1e-5, rtol=1e-5)
        assert logprobs.token_logprobs[0] is None
        assert math.isclose(sum(logprobs.token_logprobs[1:]), run.score([text])[0].total, abs_tol=1e-4)
        assert "".join(logprobs.tokens) == text
        assert [text[at : at + 1] for at in logprobs.text_offset] == [token[:1] for token in logprobs.tokens]
        assert all(len(best) == 2 for best in logprobs.top_logprobs[1:])


def test_logprobs_of_answers(client: "openai.OpenAI", server: Server) -> None:
    run, spelled = server.run("lm"), server.service.find("lm", "generate").text_of
    found = client.completions.create(model="lm", prompt="the fox", max_tokens=9, temperature=0, logprobs=3).choices[0]
    names = [spelled(id) for id in range(run.tokenizer.size)]
    answer = [names.index(token) for token in found.logprobs.tokens]
    expected = score(run.model, [run.tokenizer.encode("the fox") + answer])[0][-9:]
    torch.testing.assert_close(torch.tensor(found.logprobs.token_logprobs), expected, atol=1e-5, rtol=1e-5)
    for token, own, best in zip(
        found.logprobs.tokens, found.logprobs.token_logprobs, found.logprobs.top_logprobs, strict=True
    ):
        assert best[token] == own == max(best.values())
