"""Keys, limits and headers: what every request passes first."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError

from anyformer.generation.engine.interface import Limits
from anyformer.generation.http.bodies import CompletionBody
from anyformer.generation.http.limits import HttpLimits
from anyformer.generation.http.service import ServedRun
from anyformer.tasks.output_constraints import OutputConstraints
from tests.calls import CountedCalls
from tests.serve.http.served import Server, serving

KEY = "k" * 32
BODY = {"model": "lm", "prompt": "the", "max_tokens": 1}


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    limits = HttpLimits(body=2000, texts=4, streams=1, body_seconds=0.5)
    with serving(("lm", "bytes"), limits, Limits(queue=2), keys=[KEY, "other" * 5]) as one:
        one.client.headers["Authorization"] = f"Bearer {KEY}"
        yield one


def test_every_response_has_a_request_id(server: Server) -> None:
    for path in ("/health", "/nothing", "/v1/models", "/v1/completions", "/"):
        assert server.client.get(path).headers["x-request-id"]
    assert server.client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.client.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"


def test_paths_and_methods_that_are_not_there(server: Server) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        found = server.client.request(method, path)
        assert (found.status_code, found.json()["error"]["type"]) == (status, "invalid_request_error")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"a":' * 5000, b"1" * 5000, b'{"prompt":"\\ud800"}']
)
def test_bodies_that_are_not_requests(server: Server, body: bytes) -> None:
    found = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert found.json()["error"]["message"]


def test_other_sites_are_refused(server: Server) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}):
        assert server.client.get("/v1/models", headers=headers).status_code == 403
    assert server.client.get("/v1/models", headers={"Origin": server.address}).status_code == 200


def test_a_key_is_needed(strict: Server) -> None:
    for headers in ({}, {"Authorization": KEY}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": "Bearer é"}):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        found = httpx.post(f"{strict.address}/v1/completions", json=BODY, headers=raw)
        assert (found.status_code, found.json()["error"]["type"]) == (401, "authentication_error")
    assert httpx.get(f"{strict.address}/health").status_code == 200
    assert httpx.get(f"{strict.address}/metrics").status_code == 401
    other = httpx.post(
        f"{strict.address}/v1/completions", json=BODY, headers={"Authorization": f"bearer {'other' * 5}"}
    )
    assert other.status_code == 200


def chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 100):
        yield b" " * 100


def test_large_bodies_are_refused(strict: Server) -> None:
    whole = strict.client.post("/v1/completions", content=b" " * 3000)
    chunked = strict.client.post("/v1/completions", content=chunks(3000))
    assert whole.status_code == chunked.status_code == 413
    assert whole.json()["error"]["code"] == "body_too_large"
    assert strict.post("/v1/completions", **BODY).status_code == 200


def test_the_response_to_a_large_body_is_not_lost(strict: Server) -> None:
    """A connection that is closed before a body has been read is reset, and its response may never arrive."""
    host, key = strict.address.removeprefix("http://"), {"Authorization": f"Bearer {KEY}"}
    with closing(HTTPConnection(host, timeout=60)) as connection:
        for body, status in ((b" " * 8_000_000, 413), (json.dumps(BODY).encode(), 200)) * 5:  # on one connection
            connection.request("POST", "/v1/completions", body, key | {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            assert response.status == status


def test_slow_bodies_are_refused(strict: Server) -> None:
    def slow() -> Iterator[bytes]:
        yield b"{"
        time.sleep(1)
        yield b"}"

    with suppress(httpx.WriteError):  # the server may close first
        assert strict.client.post("/v1/completions", content=slow()).status_code == 408


def test_many_texts_are_refused(strict: Server) -> None:
    assert "limit" in strict.refused("/v1/completions", **{**BODY, "prompt": ["a"] * 5})["message"]
    assert "limit" in strict.refused("/v1/completions", **{**BODY, "prompt": ["a", "b"], "n": 3})["message"]


def test_many_streams_are_refused(strict: Server) -> None:
    body = {"model": "bytes", "prompt": "the", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with strict.client.stream("POST", "/v1/completions", json=body) as first:
        assert first.status_code == 200
        lines = first.iter_lines()  # kept: a generator that ends closes the connection
        next(lines)
        assert strict.refused("/v1/completions", 429, **body)["type"] == "rate_limit_error"
    until = time.monotonic() + 10
    while strict.service.streams and time.monotonic() < until:  # closing the connection ends the answer
        time.sleep(0.01)
    assert strict.service.streams == 0


def test_a_full_queue_is_429(strict: Server) -> None:
    body = {"model": "bytes", "prompt": ["a"] * 4, "max_tokens": 200, "ignore_eos": True}
    assert strict.refused("/v1/completions", 429, **body)["code"] == "queue_full"


CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "parenthesis|group|\\)"),
    ({"regex": "(" * 900 + ")" * 900}, "nested too deeply"),
    ({"json": {"type": "nonsense"}}, "type"),
    ({"choice": []}, "choice"),
    ({"choice": ["a"], "regex": "a"}, "give one"),
    ({}, "give one"),
]


@pytest.mark.parametrize(("rules", "why"), CONSTRAINTS)
def test_constraints_that_are_refused(strict: Server, rules: dict[str, Any], why: str) -> None:
    error = strict.refused("/v1/completions", model="bytes", prompt="a", structured_outputs=rules)
    assert re.search(why, error["message"])


BOMBS = [
    "((a{99}){99}){99}x",
    "(a|b)*a(a|b){1000}",
    "a{99999}",
    "((((a?){50}){50}){50}){50}b",
    "(){999999}(a?){99999}c",
]


def test_large_patterns_are_no_burden(server: Server) -> None:
    """What is built of a pattern is what its answer visits: a few states for each of its bytes."""
    for i, pattern in enumerate(BOMBS * 2):
        body = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": f"{pattern}<{i}>"}}
        assert server.ok("/v1/completions", model="bytes", **body)["choices"][0]["finish_reason"] == "length"
        run = server.service.runs["bytes"]
        constraint = run.constraint(OutputConstraints(regex=pattern), run.stop, alone=False)
        state = torch.tensor([constraint.start()])
        for token in run.tokenizer.encode("aaaa"):
            state = constraint.advance(state, torch.tensor([token]))
        assert constraint._automaton.size < 2 + 4 * 8
    body = {"prompt": "a", "structured_outputs": {"regex": "[ab]{3}"}}
    assert re.fullmatch("[ab]{3}", server.ok("/v1/completions", model="bytes", **body)["choices"][0]["text"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_closed_connection_does_not_wait_for_its_constraint(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    built, begun = threading.Event(), threading.Event()

    def wait(*_: object, **__: object) -> None:
        begun.set()
        built.wait(60)

    monkeypatch.setattr(ServedRun, "constraint", wait)
    body = {"model": "chat", "structured_outputs": {"regex": "a"}}
    asked = body | ({"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]})
    try:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(path, json=asked, timeout=httpx.Timeout(10, read=0.2))
        assert begun.wait(10)
        until = time.monotonic() + 10
        while server.service.active and time.monotonic() < until:
            time.sleep(0.01)
        assert not server.service.active
    finally:
        built.set()


def test_a_closed_connection_cancels_the_answer(server: Server) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    body = b'{"model": "bytes", "prompt": "a", "max_tokens": 30000, "ignore_eos": true}'
    with socket.create_connection((host, int(port))) as one:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.5)
        assert server.service.engine.stats()["bytes"].running == 1
    until = time.monotonic() + 10
    while server.service.engine.stats()["bytes"].running and time.monotonic() < until:
        time.sleep(0.01)
    assert server.service.engine.stats()["bytes"].running == 0


@pytest.mark.parametrize("text", ["<image:/etc/passwd> a", "/etc/passwd.png", "a\t/tmp/x.wav", "<features:x.npz#a/0>"])
def test_no_name_of_a_request_reaches_the_file_system(
    server: Server, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    server.ok("/tokenize", model="lm", prompt=text)  # plain text for a model that reads tokens alone
    store = SimpleNamespace(required=False)  # reading it would fail
    monkeypatch.setattr(server.run("lm").tokenizer, "media", store)
    for path, body in (("/tokenize", {"prompt": text}), ("/v1/completions", {"prompt": ["a", text]})):
        assert "references to files" in server.refused(path, model="lm", **body)["message"]
    store.required = True
    assert "reads images or sounds" in server.refused("/tokenize", model="lm", prompt="a")["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a"] * 400_000},
        {"prompt": [[1]] * 300_000},
        {"prompt": [True] * 300_000},
        {"prompt": "a", **{f"x{i}": 1 for i in range(100_000)}},
        {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(100_000)}},
    ],
    ids=["texts", "rows", "flags", "fields", "biases"],
)
def test_a_body_of_many_faults_is_refused_at_the_first(server: Server, body: dict[str, Any]) -> None:
    assert server.post("/v1/completions", model="lm", **body).status_code == 400
    with CountedCalls() as counted, pytest.raises(ValidationError) as error:
        CompletionBody.model_validate(body)
    assert counted.count < 100
    assert error.value.error_count() < 10
