"""`hf:owner/name`: a model by its name, from a local stand-in for the hub."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from anyformer.config import ConfigError
from anyformer.interop import hub
from tests.interop.test_encoders import bert
from tests.interop.test_sentence_transformers import sentences
from tests.test_cli import run as invoke

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOTHING_ELSE = ("README.md", "onnx/model.onnx", "pytorch_model.bin", "tf_model.h5", "custom.py")  # of no use here

# One process makes every call: the client reads its environment once.
CALLS = """
import json, sys
from huggingface_hub import constants
from anyformer.interop import hub, import_model
def said(source, **options):
    try:
        return "folder " + str(hub.download(source, **options))
    except ValueError as error:
        return str(error)
results = {
    "new": said("hf:one/small"),
    "revision": said("hf:one/small@v1"),
    "missing revision": said("hf:one/small@v9"),
    "missing": said("hf:one/nothing"),
    "gated": said("hf:one/gated"),
    "pickle": said("hf:one/pickled"),
    "allowed": said("hf:one/pickled", allow_pickle=True),
    "broken": said("hf:one/broken"),
    "run": import_model("hf:one/small", sys.argv[1]).spec.kind,
}
constants.HF_HUB_OFFLINE = True
results |= {"cached": said("hf:one/small"), "offline": said("hf:one/other")}
print(json.dumps(results))
"""


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by name, as folders; requests are recorded."""

    def __init__(self, repositories: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.read: list[str] = []  # files that were sent


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self._api("/".join(path[2:4]), path[4:])
        else:
            self._file("/".join(path[:2]), "/".join(path[4:]))

    def _api(self, name: str, rest: list[str]) -> None:
        if name == "one/gated":
            self._answer(403, {"error": "gated"}, **{"X-Error-Code": "GatedRepo"})
        elif name == "one/broken":
            self._answer(500, {"error": "broken"})
        elif (folder := self.server.repositories.get(name)) is None:
            self._answer(404, {"error": "nothing"}, **{"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["tree"]:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            self._answer(200, [_entry(path, folder) for path in files])
        elif rest[1:] in ([], ["main"], ["v1"], [COMMIT]):
            self._answer(200, {"id": name, "sha": COMMIT, "siblings": []})
        else:
            self._answer(404, {"error": "no such revision"}, **{"X-Error-Code": "RevisionNotFound"})

    def _file(self, name: str, file: str) -> None:
        path = self.server.repositories[name] / file
        if self.command == "GET":
            self.server.read.append(f"{name}/{file}")
        content = path.read_bytes()
        headers = {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": COMMIT}
        self._answer(200, content, **headers)

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _hash(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _hash(path)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Path]]:
    home = tmp_path_factory.mktemp("hub")
    sentences(home / "small", bert("Model"), "mean", unit=True)
    for name in NOTHING_ELSE:
        path = home / "small" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"nothing")
    (home / "pickled").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        (home / "pickled" / name).write_bytes(b"{}")
    with Hub({"one/small": home / "small", "one/pickled": home / "pickled"}) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server, home
        server.shutdown()


@pytest.fixture(scope="module")
def results(served: tuple[Hub, Path]) -> dict[str, str]:
    server, home = served
    environment = {
        **os.environ,
        "HF_HOME": str(home / "cache"),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    command = [sys.executable, "-c", CALLS, str(home / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_only_what_is_needed_is_downloaded(served: tuple[Hub, Path], results: dict[str, str]) -> None:
    server, home = served
    folder = Path(results["new"].removeprefix("folder "))
    wanted = {path.relative_to(home / "small").as_posix() for path in (home / "small").rglob("*") if path.is_file()}
    got = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert got == wanted - {*NOTHING_ELSE}
    assert {"1_Pooling/config.json", "model.safetensors"} <= got
    sent = [name for name in server.read if name.startswith("one/small/")]
    assert sorted(sent) == sorted({*sent}), "a file was downloaded twice"
    assert results["revision"] == results["cached"] == results["new"]
    assert results["run"] == "encoder"


def test_pickle_is_downloaded_on_request_only(served: tuple[Hub, Path], results: dict[str, str]) -> None:
    assert results["pickle"].startswith("hf:one/pickled: has no model.safetensors; --allow-pickle also accepts ")
    assert Path(results["allowed"].removeprefix("folder "), "pytorch_model.bin").is_file()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing revision", "hf:one/small@v9: has no revision 'v9'"),
        ("missing", "hf:one/nothing: is not on http://127.0.0.1:"),
        ("gated", "hf:one/gated: is gated: accept its terms on http://127.0.0.1:"),
        ("broken", "hf:one/broken: "),
        ("offline", "hf:one/other: is not in "),
    ],
)
def test_errors_are_one_line(case: str, words: str, results: dict[str, str]) -> None:
    assert results[case].startswith(words)
    assert "\n" not in results[case]
    if case == "offline":
        assert "HF_HUB_OFFLINE is set" in results[case]


def test_without_the_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    done = invoke("import", "hf:one/small@v1")
    assert done.exit_code == 2
    assert done.stderr == "hf:one/small@v1: needs the package huggingface_hub: pip install 'anyformer[hf]'\n"
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("name", ["hf:", "hf:/x", "hf:a/b/c", "hf:a b", "hf:a/b@", "hf:모델/이름"])
def test_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name: write hf:owner/name"):
        hub.download(name)


def test_the_folder_of_a_name() -> None:
    assert hub.folder_name("hf:one/small@v1") == "small"
    assert hub.folder_name("models/small/") == "small"
    assert hub.folder_name("there/small/model") == "small"
    assert hub.folder_name(__file__) == "test_hub"
