"""Shutdown of `anyformer explore` by Ctrl-C or SIGTERM, idle or during a computation, with exit code 0."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import pytest

from anyformer.explore.open_runs import open_runs
from anyformer.explore.server import ExploreServer
from tests.explore.made import body, written
from tests.test_cli import run

# A slow `heads` view, so that the signal arrives while torch computes in another thread.
SLOW = """
import sys, time, torch
from anyformer.cli import main
from anyformer.explore.views import HeadsView
def slow(view, trace, request):
    print("computing", flush=True)
    end, x = time.monotonic() + 1, torch.rand(64, 64)
    while time.monotonic() < end:
        x = (x @ x).softmax(-1)
    return {}
HeadsView.answer = slow
sys.argv[1:] = ["explore", *sys.argv[1:], "--port", "0", "--no-browser"]
main()
"""


@contextmanager
def pending_request(line: str) -> Iterator[None]:
    """Send a request to the address in a line, and do not read the answer."""
    (port,) = re.findall(r"^http://127\.0\.0\.1:(\d+)/", line)
    with closing(http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)) as connection:
        connection.request("POST", "/api/heads", json.dumps(body("lm", kind="decoder", layer=0)))
        yield


def test_ctrl_c_in_the_middle_of_a_computation(tmp_path: Path) -> None:
    """The interpreter does not exit while another thread is in native code, which would abort it (SIGABRT, -6)."""
    command = [sys.executable, "-c", SLOW, str(written("lm", tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        with pending_request(process.stdout.readline()):
            assert process.stdout.readline() == "computing\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


def test_sigterm_ends_it_as_ctrl_c_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExploreServer, "serve_forever", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    assert run("explore", written("lm", tmp_path), "--port", "0", "--no-browser").exit_code == 0


def test_a_signal_that_an_import_swallows_still_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code that torch imports may swallow the exception of a signal: it is checked again before serving."""

    def swallowing(*_: object) -> object:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return open_runs([written("lm", tmp_path)])

    served, before = Event(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("anyformer.explore.open_runs.open_runs", swallowing)
    monkeypatch.setattr(ExploreServer, "serve_forever", lambda self: served.set())
    assert run("explore", tmp_path / "lm", "--port", "0", "--no-browser").exit_code == 1
    assert not served.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_server_waits_for_active_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, proceed = Event(), Event()

    def slow(*_: object) -> dict[str, object]:
        started.set()
        proceed.wait(10)
        return {}

    monkeypatch.setattr("anyformer.explore.open_runs.Workspace.answer", slow)
    with ExploreServer(open_runs([written("lm", tmp_path)])) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        with pending_request(server.address):
            assert started.wait(10)
            assert not server.finish(0.02)
            proceed.set()
            assert server.finish(10)
        server.shutdown()
        thread.join()
