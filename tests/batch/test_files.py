"""`anyformer predict --out`: stopped anywhere, it continues, and its output is that of an undisturbed run."""

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anyformer.cli.progress import counting_lines
from anyformer.config import ConfigError, Fault
from anyformer.generation.batch import predictor as predictor_module, shards
from anyformer.generation.batch.input_lines import LineReader
from anyformer.generation.batch.predictor import Predicted, Predictor
from tests.explore import made
from tests.test_cli import done, refused, run as invoke


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.written("pair", tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 4 lines, shards of 8, and a record after each window."""
    monkeypatch.setattr(predictor_module, "WINDOW", 4)
    monkeypatch.setattr(shards, "SHARD_LINES", 8)
    monkeypatch.setattr("anyformer.generation.batch.partial_file.SECONDS_BETWEEN_RECORDS", 0.0)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"the fox {i % 10} dog\n" if i % 5 else "\n" for i in range(42)), encoding="utf-8")
    return path


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the program after some windows."""
    real, calls = Predictor.predict_window, iter(range(count))

    def limited(*arguments: object, **options: object) -> Predicted:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Predictor, "predict_window", limited)


@pytest.mark.parametrize("windows", [0, 1, 4, 10])
def test_one_file_is_continued(folder: Path, lines: Path, windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = lines.with_name("whole"), lines.with_name("out")
    done("predict", folder, lines, "--out", whole)
    with monkeypatch.context() as patch:
        stop_after(windows, patch)
        found = invoke("predict", folder, lines, "--out", out)
    assert found.exit_code == 3
    assert not out.exists()
    part, record = out.with_name("out.part"), out.with_name("out.part.json")
    assert part.read_bytes() == b"".join(whole.read_bytes().splitlines(keepends=True)[: 4 * windows])
    assert record.exists() == bool(windows)
    with part.open("ab") as file:
        file.write(b"of a window that was not recorded")
    found = invoke("predict", folder, lines, "--out", out)
    assert found.exit_code == 0
    assert (f"continues after line {4 * windows}" in found.stderr) == bool(windows)
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(lines.parent)) == ["in.txt", "out", "whole"]


def test_a_partial_file_of_something_else_is_not_continued(
    folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = lines.with_name("out")
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        invoke("predict", folder, lines, "--out", out)
    (line,) = refused("predict", folder, lines, "--out", out, "--beams", "2")
    assert line == f"{out}.part: was begun with another beams: remove it to begin again"
    content = lines.read_text()
    lines.write_text(content.replace("fox", "dog", 1))
    (line,) = refused("predict", folder, lines, "--out", out)
    assert line == f"{out}.part: was begun with another input: its first 8 lines differ: remove it to begin again"
    lines.write_text(content + "the dog\n")  # later lines may differ
    assert invoke("predict", folder, lines, "--out", out).exit_code == 0
    assert len(out.read_text().splitlines()) == 43
    Path(f"{out}.part").write_text("short")
    Path(f"{out}.part.json").write_text(json.dumps({"identity": {}, "done": {}}))
    (line,) = refused("predict", folder, lines, "--out", out)
    assert line.startswith(f"{out}.part: was begun with another run, device, version")


@pytest.mark.parametrize("windows", [1, 3, 12])
def test_several_files_are_continued(folder: Path, lines: Path, windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other, out = lines.with_name("other.txt"), lines.with_name("out")
    other.write_text("the quick fox\n" * 9)
    for path in (lines, other):
        done("predict", folder, path, "--out", path.with_suffix(".expected"))
    with monkeypatch.context() as patch:
        stop_after(windows, patch)
        assert invoke("predict", folder, lines, other, "--out", out).exit_code == 3
    done("predict", folder, lines, other, "--out", out)
    for path in (lines, other):
        assert (out / path.name).read_bytes() == path.with_suffix(".expected").read_bytes()
    assert sorted(os.listdir(out)) == [".in.txt.json", ".other.txt.json", "in.txt", "other.txt"]
    with monkeypatch.context() as patch:
        stop_after(0, patch)  # nothing is left to predict
        done("predict", folder, lines, other, "--out", out)
        (out / "in.txt").write_text("changed\n")
        assert invoke("predict", folder, lines, other, "--out", out).exit_code == 3


def test_wrong_paths_are_one_line(folder: Path, lines: Path) -> None:
    out = lines.with_name("out")
    assert refused("predict", folder, lines, lines, "--out", out) == [
        "FILES: two of them are called in.txt: their outputs would be one"
    ]
    assert refused("predict", folder, lines, folder / "task.json") == [
        "--out: is missing: of several files, name a folder for the predictions"
    ]
    (line,) = refused("predict", folder, lines, folder / "task.json", "--out", lines.parent)
    assert line.startswith(f"--out = '{lines.parent}': ")
    assert refused("predict", folder, lines, "--jobs", "2") == ["--jobs: belongs to --engine ray"]


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\r\nb\rc\n\n", "\r", "a\r\r\nb", "한\n국", "\n\na"])
@pytest.mark.parametrize("count", [1, 2, 100])
def test_lines_are_those_of_the_whole_text(text: str, count: int) -> None:
    whole = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8").read()  # universal newlines
    reader, found, sizes = LineReader(io.BytesIO(text.encode()), "it"), list[str](), [0]
    while lines := reader.read(count):
        found += lines
        sizes.append(reader.bytes)
    assert found == (whole.removesuffix("\n").split("\n") if whole else [])
    assert (reader.lines, reader.bytes) == (len(found), len(text.encode()))
    for size in sizes:
        again = LineReader(io.BytesIO(text.encode()), "it")
        again.skip(size, 0)
        rest = again.read(100)
        assert rest == found[len(found) - len(rest) :]
        assert again.sha256 == reader.sha256


def test_lines_of_a_pipe_that_pauses() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as file, os.fdopen(write, "wb", buffering=0) as pipe:
        reader = LineReader(file, "pipe")
        pipe.write(b"one\ntwo\nthr")
        assert reader.read(100) == ["one", "two"]
        pipe.write(b"ee\n")
        assert reader.read(100) == ["three"]
        pipe.close()
        assert reader.read(100) == []


def test_bytes_that_are_no_text(folder: Path, lines: Path) -> None:
    lines.write_bytes(b"the\n" * 6 + b"a \xff\n")
    (line,) = refused("predict", folder, lines, "--out", lines.with_name("out"))
    assert line == f"{lines}: is not UTF-8 at byte 26: convert it to UTF-8"


class Shuffled:
    """Workers that take three shards at once and finish the last one first."""

    def __init__(self, predictor: Predictor):
        self.predictor, self.calls = predictor, 0

    def predict(self, texts: Iterable[shards.ShardText]) -> Iterator[tuple[int, Predicted]]:
        self.calls, waiting = self.calls + 1, enumerate(texts)
        while some := list(islice(waiting, 3)):
            yield from ((i, shards.predict_shard(self.predictor, shard)) for i, shard in reversed(some))


def write_files(lines: Path) -> list[Path]:
    """Write files of several shards, of one and of none."""
    files = [lines, *(lines.with_name(f"{name}.txt") for name in ("short", "empty", "다른", "last"))]
    for path, count in zip(files[1:], (3, 0, 20, 9), strict=True):
        path.write_text("".join(f"the quick fox {i % 10}\n" for i in range(count)))
    return files


def test_workers_get_the_shards_of_all_files_at_once(folder: Path, lines: Path) -> None:
    files, predictor = write_files(lines), Predictor(folder)
    workers, out = Shuffled(predictor), lines.with_name("out")
    with counting_lines(None) as advance:
        found = shards.predict_files(predictor, {}, files, out, workers, advance)
    assert workers.calls == 1
    assert list(found) == files
    assert [notes.lines for notes in found.values()] == [42, 3, 0, 20, 9]
    for path in files:
        done("predict", folder, path, "--out", path.with_suffix(".expected"))
        assert (out / path.name).read_bytes() == path.with_suffix(".expected").read_bytes()
    assert sorted(os.listdir(out)) == sorted(name for path in files for name in (path.name, f".{path.name}.json"))


class Ray:
    """A cluster in this process, which counts what it starts."""

    def __init__(self) -> None:
        self.clusters, self.workers = 0, list[Any]()

    @contextmanager
    def open(self, address: str | None, cpus: int) -> Iterator["Ray"]:
        self.clusters += 1
        yield self

    def remote(self, **options: Any) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(remote=lambda *arguments: self._start(kind, arguments))

    def _start(self, kind: type, arguments: tuple[Any, ...]) -> Any:
        self.workers.append(SimpleNamespace(texts=0))
        worker, inner = self.workers[-1], kind(*arguments)

        def predict(shard: shards.ShardText) -> Any:
            worker.texts += len(shard.lines)
            return lambda: inner.predict(shard)

        worker.predict = SimpleNamespace(remote=predict)
        return worker

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def wait(self, running: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return running[:num_returns], running[num_returns:]

    def get(self, ready: Any) -> Any:
        return ready()


def test_one_cluster_for_all_files(folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, cluster, out = write_files(lines), Ray(), lines.with_name("out")
    monkeypatch.setattr("anyformer.generation.batch.ray_workers.ray_cluster", cluster.open)
    monkeypatch.setattr("anyformer.generation.batch.ray_workers.prepare_worker", lambda *_: None)
    command = ("predict", folder, *files, "--out", out, "--engine", "ray", "--jobs", "2")
    done(*command)
    assert cluster.clusters == 1
    assert len(cluster.workers) == 2
    assert all(worker.texts > 0 for worker in cluster.workers)
    assert [len((out / path.name).read_text().splitlines()) for path in files] == [42, 3, 0, 20, 9]
    done(*command)  # nothing is left
    assert cluster.clusters == 1
    (out / files[-1].name).unlink()
    done(*command)
    assert cluster.clusters == 2


@pytest.mark.parametrize("error", [Exception("node timed out\nmore"), RuntimeError("no"), OSError()])
@pytest.mark.parametrize("address", [None, "auto"])
def test_a_cluster_that_does_not_start_is_one_line(
    folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, address: str | None
) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")

    def init(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    given = ("--address", address) if address else ()
    (line,) = refused("predict", folder, lines, "--out", lines.with_name("out"), "--engine", "ray", *given)
    first = str(error).partition("\n")[0] or type(error).__name__
    start = "--address = 'auto': " if address else "--engine = ray: no cluster started on this machine: "
    assert line == f"{start}{first}"


def test_a_fault_of_a_line_names_its_file(folder: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Predictor, texts: list[str], first: int) -> Predicted:
        raise ConfigError([Fault(f"text {first + 2}", "is too long")])

    monkeypatch.setattr(Predictor, "predict_window", refuse)
    files = write_files(lines)[1:]
    (line,) = refused("predict", folder, *files, "--out", lines.with_name("out"))
    assert line == f"{files[0]}: line 2: is too long"
