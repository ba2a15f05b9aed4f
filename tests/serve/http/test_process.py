"""The server as a process: signals, slow clients, hosts and keys."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.http.process import ROOT, started, written

pytestmark = pytest.mark.system
LONG = {"model": "bytes", "prompt": "the", "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return written(tmp_path_factory.mktemp("runs"), ["bytes"])


def streamed_tokens(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def test_sigterm_lets_running_requests_finish(runs: list[str]) -> None:
    with started(*runs) as (process, address), httpx.Client(base_url=address, timeout=60) as client:
        expected = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        answers: list[str] = []
        one = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{address}/v1/completions", json=LONG, timeout=60).json()["choices"][0]["text"]
            )
        )
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            pieces = streamed_tokens(response)
            text = next(pieces)
            one.start()
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            refused = httpx.post(f"{address}/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert httpx.get(f"{address}/ready").status_code == 503
            assert httpx.get(f"{address}/health").status_code == 200
            text += "".join(pieces)
        one.join()
        assert [text, *answers] == [expected] * 2
        assert process.wait(30) == 0


def test_a_second_signal_ends_at_once(runs: list[str]) -> None:
    with started(*runs) as (process, address), httpx.Client(base_url=address, timeout=60) as client:
        body = {**LONG, "max_tokens": 30_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            pieces = streamed_tokens(response)  # kept: a generator that ends closes the connection
            next(pieces)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(5) == 1


def test_slow_headers_are_cut_off(runs: list[str]) -> None:
    with started(*runs) as (_, address):
        host, port = address.removeprefix("http://").split(":")
        with (
            socket.create_connection((host, int(port)), timeout=15) as silent,
            socket.create_connection((host, int(port)), timeout=15) as slow,
        ):
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127")
            assert silent.recv(100) == slow.recv(100) == b""


def test_other_hosts_need_keys(runs: list[str], tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "anyformer", "serve", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    refused = run(*runs, "--host", "0.0.0.0")
    assert (refused.returncode, "--api-key-file" in refused.stderr) == (2, True)
    keys = tmp_path / "keys"
    for text in ("", "# nothing", "short", "with a space in it"):
        keys.write_text(text)
        assert run(*runs, "--api-key-file", str(keys)).returncode == 2
    keys.write_text("# mine\n" + "x" * 20 + "\n")
    with started(*runs, "--host", "0.0.0.0", "--api-key-file", str(keys)) as (_, address):
        local = address.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{local}/v1/models").status_code == 401
        assert httpx.get(f"{local}/v1/models", headers={"Authorization": f"Bearer {'x' * 20}"}).status_code == 200
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another" in run(*runs, "--port", port).stderr
