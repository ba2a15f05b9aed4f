"""The example of Ray Serve answers as the run does."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import anyformer as af
from tests.serve.http.process import ROOT, written

SECONDS_TO_START = 120


@pytest.mark.system
def test_replicas_behind_one_address(tmp_path: Path):
    pytest.importorskip("ray.serve", reason="needs the extra `dev-all` (ray[serve])", exc_type=ImportError)
    (folder,) = written(tmp_path, ["bytes"])
    (expected,) = af.load(folder).generate(["ab"], max_new_tokens=6, temperature=0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "examples/ray_serve.py", folder, "--replicas", "2", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(process, f"{address}/ready", tmp_path / "log")
            body = {"prompt": "ab", "max_tokens": 6, "temperature": 0}
            for _ in range(6):  # by either replica
                found = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
                assert found.status_code == 200, found.text
                assert expected.endswith(found.json()["choices"][0]["text"])
            with httpx.stream("POST", f"{address}/v1/completions", json={**body, "stream": True}) as stream:
                assert list(stream.iter_lines())[-2] == "data: [DONE]"
            assert httpx.post(f"{address}/v1/completions", json={"suffix": "x"}).status_code == 400
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # Ray ends its processes one by one, slowly on a busy machine
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(SECONDS_TO_START):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(address, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError(log.read_text())
