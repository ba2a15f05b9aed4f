"""The server: allowed hosts, errors for wrong requests, and the command line."""

import http.client
import json
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from anyformer.explore import show as show_module
from anyformer.explore.open_runs import open_runs
from anyformer.explore.server import ExploreServer
from tests.explore.made import TEXT, body, written
from tests.test_cli import refused, run
from tests.training import small

NAMES = ("pair", "lm", "classify")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        written(name, home)
    return home


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ExploreServer]:
    with ExploreServer(open_runs([folder / name for name in NAMES])) as one:
        thread = Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def send(
    server: ExploreServer, path: str, request: Any = None, *, raw: bytes | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Return status, answer and headers of a request; a POST if it has a body."""
    data = raw if request is None else json.dumps(request).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)) as connection:
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        text, result = response.read().decode(), dict(response.getheaders())
    return response.status, json.loads(text) if "/json" in result["Content-Type"] else text, result


def test_the_content_policy_of_the_page(server: ExploreServer) -> None:
    """Only its own style and script, by a nonce used once; no other sources, no inline handlers."""
    status, page, headers = send(server, "/")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert status == 200
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', page))
    assert policy["script-src"] == policy["style-src"] == f"'nonce-{nonce}'"
    assert nonce != re.findall(r'nonce="([^"]+)"', send(server, "/")[1])[0]
    assert [len(re.findall(f"(?m)^<{tag}", page)) for tag in ("script", "style")] == [1, 1]
    markup = re.sub(r"(?s)<(style|script)[^>]* nonce.*</\1>", "", page)
    assert not re.findall(r"""\s(on\w+|style|src)=|https?://""", markup)
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_files_are_one_document(server: ExploreServer) -> None:
    files = show_module.sources()
    page = show_module.page("x")
    assert list(files)[-1] == "main.js"
    assert all(text in page for name, text in files.items() if name != "index.html")
    assert not any(re.search(r"</(script|style)", text) for name, text in files.items() if name != "index.html")


def test_the_standalone_document(server: ExploreServer) -> None:
    """Its policy is in the document and forbids connections; answers cannot close the script that holds them."""
    status, page, headers = send(server, "/alone")
    assert status == 200
    assert headers["Content-Security-Policy"] == "default-src 'none'"
    assert '<script type="application/json" id="saved">null</script>' in page
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert "connect-src" not in policy
    assert "default-src 'none'" in policy
    held = show_module.standalone({"answers": {"x": "</script><script>alert(1)</script>"}})
    saved = held.partition('id="saved">')[2].partition("</script>")[0]
    assert "<" not in saved
    assert json.loads(saved)["answers"]["x"].startswith("</script>")


def test_the_runs(server: ExploreServer) -> None:
    result = {one["name"]: one for one in send(server, "/api/runs")[1]}
    assert list(result) == list(NAMES)
    assert [result[name]["shape"] for name in NAMES] == ["encoder-decoder", "decoder", "encoder"]
    assert [result[name]["writes"] for name in NAMES] == [True, True, False]
    assert result["pair"]["kinds"]["cross"] == {"layers": [0, 1], "heads": [4, 4]}
    assert result["lm"]["limit"] == {"decoder": 48}
    assert all(one["example"] and not one["live"] for one in result.values())


def test_a_view_and_a_stream(server: ExploreServer) -> None:
    status, result, _ = send(server, "/api/heads", body("pair", kind="cross", layer=0))
    assert (status, len(result["links"])) == (200, 4)
    status, lines, headers = send(server, "/api/write", body("pair", max_new_tokens=4))
    assert (status, headers["Content-Type"]) == (200, "application/x-ndjson; charset=utf-8")
    *tokens, last = map(json.loads, lines.splitlines())
    assert [*tokens[0]] == ["text", "token", "p", "top", "cache"]
    assert last == {"done": True, "text": server.workspace.runs["pair"].run.generate([TEXT], max_new_tokens=4)[0]}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1"},
    ],
)
def test_requests_from_other_hosts_and_sites_are_refused(server: ExploreServer, headers: dict[str, str]) -> None:
    """By another host name, or from a page of another site."""
    for path, request in (("/", None), ("/api/runs", None), ("/api/read", body("pair"))):
        status, result, _ = send(server, path, request, **headers)
        assert status == 403
        assert list(result) == ["error"]


def test_its_own_page_is_answered(server: ExploreServer) -> None:
    for host in (f"127.0.0.1:{server.server_port}", f"localhost:{server.server_port}"):
        assert send(server, "/api/read", body("pair"), Host=host, Origin=f"http://{host}")[0] == 200


def test_wrong_requests(server: ExploreServer) -> None:
    def line(path: str, request: Any = None, **more: Any) -> tuple[int, str]:
        status, result, _ = send(server, path, request, **more)
        return status, result["error"]

    assert line("/nothing") == (404, "there is nothing here")
    assert line("/api/read") == (404, "there is nothing here")
    assert line("/api/nothing", {}) == (404, "no view is called 'nothing'")
    assert line("/api/../read", {}) == (404, "no view is called '../read'")
    assert line("/api/read", raw=b"{") == (400, "the request is not JSON")
    assert line("/api/read", raw=b"\xff") == (400, "the request is not JSON")
    assert line("/api/read", raw=b"[" * 100_000) == (400, "the request is not JSON")
    assert line("/api/read", [1]) == (400, "the request must be an object")
    assert line("/api/read", {}) == (400, "run: is required; text: is required")
    assert line("/api/read", body("pair", text="")) == (400, "text: is blank: there is nothing to look into")
    assert line("/api/read", body("pair", run="nobody"))[0] == 400
    assert line("/api/write", body("pair", text="")) == (400, "text: is blank: type a text")
    assert line("/api/write", body("pair", seed="x")) == (400, "seed = 'x': must be a whole number")
    assert line("/api/write", raw=b"x" * (2**20 + 1)) == (413, "the limit is 1,048,576 bytes")


def test_text_that_no_file_could_hold(server: ExploreServer) -> None:
    """JSON may hold a lone surrogate."""
    status, result, _ = send(server, "/api/read", raw=json.dumps(body("lm", text="a\ud800b")).encode())
    assert status == 400
    assert result["error"].startswith("the text holds half a character")


def test_a_port_in_use(folder: Path, server: ExploreServer) -> None:
    assert refused("explore", folder / "lm", "--port", str(server.server_port), "--no-browser") == [
        f"--port = {server.server_port}: Address already in use; choose another one"
    ]
    assert refused("explore", folder / "lm", "--port", "99999", "--no-browser") == [
        "--port = 99999: there is no such port; choose another one"
    ]


def test_runs_that_cannot_be_opened(folder: Path, tmp_path: Path) -> None:
    """The error is one line."""

    def line(run: Path) -> str:
        (only,) = refused("explore", run, "--no-browser", "--port", "0")
        return only

    assert line(tmp_path / "none") == f"{tmp_path / 'none'}: there is no such run"
    half = tmp_path / "half"
    shutil.copytree(folder / "lm", half)
    (half / "manifest.json").unlink()
    nothing = "neither a manifest.json nor a complete checkpoint yet"
    assert line(half) == f"{half}: is not a run: it has {nothing}"
    (half / "recipe.toml").touch()
    assert line(half) == f"{half}: is being written, and has {nothing}"
    for name in ("tokenizer.json", "model.safetensors"):
        bare = tmp_path / name
        shutil.copytree(folder / "lm", bare)
        (bare / name).unlink()
        assert line(bare) == f"{bare / name}: is missing"
    listed = json.loads((folder / "lm" / "manifest.json").read_text())
    del listed["files"]["tokenizer.json"], listed["sha256"]
    (bare / "manifest.json").write_text(json.dumps(listed))
    shutil.copy(folder / "lm" / "model.safetensors", bare)
    assert line(bare) == f"{bare / 'tokenizer.json'}: is not in manifest.json"


def test_the_verb_prints_the_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by an interrupt, and opens the browser unless `--no-browser` is given."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(ExploreServer, "serve_forever", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    result = run("explore", folder / "lm", folder / "lm", "--port", "0")
    assert result.exit_code == 0
    (address,) = re.findall(r"^http://127\.0\.0\.1:\d+/", result.stdout)
    assert opened == [address]
    run("explore", folder / "lm", "--port", "0", "--no-browser")
    assert opened == [address]
    assert list(open_runs([folder / "lm", folder / "lm"]).runs) == ["lm", "lm-2"]


def test_a_run_that_is_trained(tmp_path: Path) -> None:
    """Metrics, checkpoints by step, and an example of the run's data."""
    recipe = small.pairs("decoder", steps=4, evaluate_every=2)
    small.run(recipe, tmp_path / "run")
    workspace = open_runs([tmp_path / "run"])
    result = workspace.answer("live", {"run": "run"})
    steps = result["checkpoints"]
    assert result["count"] == len(result["rows"]) > 0
    assert not result["live"]
    assert workspace.answer("live", {"run": "run", "since": result["count"] - 1})["rows"] == result["rows"][-1:]
    (about,) = workspace.about()
    assert re.fullmatch(r"\d( \d)+", about["example"])
    request = {"run": "run", "text": about["example"], "kind": "decoder", "layer": 0}
    maps = [workspace.answer("heads", {**request, "step": step})["links"] for step in steps]
    assert maps[-1] == workspace.answer("heads", request)["links"]
    (tmp_path / "run" / "manifest.json").unlink()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a line that is being written
    again = open_runs([tmp_path / "run"])
    assert again.about()[0]["live"]
    assert again.answer("live", {"run": "run"})["count"] == result["count"]


def test_it_is_on_this_machine_alone(server: ExploreServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with socket.socket() as other:
        other.settimeout(1)
        assert other.connect_ex((socket.gethostbyname("localhost"), server.server_port)) == 0


def test_a_mixture_is_a_run_for_each_tsend(tmp_path: Path) -> None:
    small.run(small.mixed(tmp_path, steps=1), tmp_path / "mixed")
    workspace = open_runs([tmp_path / "mixed"])
    assert list(workspace.runs) == ["mixed:large", "mixed:copy"]
    first, second = (workspace.answer("read", {"run": name, "text": "a"}) for name in workspace.runs)
    assert (first["tokens"]["encoder"][0], second["tokens"]["encoder"][0]) == ("<task:large>", "<task:copy>")
