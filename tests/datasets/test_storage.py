"""Where data sets are found, unpacking of bundled ones, and what a recipe says without its data."""

import errno
import gzip
import hashlib
import lzma
import multiprocessing
import os
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config.spec import ConfigError
from anyformer.data.datasets import storage
from anyformer.data.datasets.download import fetch
from anyformer.data.datasets.registry import lookup, registry
from anyformer.data.files import locate
from anyformer.data.fingerprint import fingerprint
from anyformer.data.readers import read
from anyformer.recipe import ready as recipes
from anyformer.recipe.data import named_files
from anyformer.runs import processes
from tests.datasets.upstream import data_set, lay_out

SCAN = "scan/tasks_test_simple.txt"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ANYFORMER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "anyformer" / "data"


def write(path: Path, text: str = "IN: a OUT: b\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_root_then_environment_then_cache_then_package(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = recipes.read_recipe("scan").data
    assert locate(SCAN, data) == cache / SCAN
    packed = resources.files("anyformer.data.datasets") / "bundled" / f"{SCAN}.xz"
    assert (cache / SCAN).read_bytes() == lzma.decompress(packed.read_bytes())
    assert [path.name for path in cache.iterdir()] == ["scan"]  # nothing is left over
    monkeypatch.setenv("ANYFORMER_DATA", str(tmp_path / "환경"))
    assert locate(SCAN, data) == cache / SCAN  # not there: the next place
    there = write(tmp_path / "환경" / SCAN)
    assert locate(SCAN, data) == there
    given = write(tmp_path / "root" / SCAN)
    assert locate(SCAN, data.model_copy(update={"root": "root"})) == Path("root", SCAN)
    assert given.samefile(Path("root", SCAN))
    with pytest.raises(ConfigError, match=r"set data\.root to the folder"):  # a root is never passed over
        locate(SCAN, data.model_copy(update={"root": str(tmp_path)}))


def test_paths_of_other_files_are_found_as_without_data_sets(tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.txt")
    data = recipes.read_recipe("scan", ["data.train.path=mine.txt", "data.test=none"]).data
    assert locate("mine.txt", data).samefile(mine)
    assert list(fingerprint(data)) == ["data.train.path"]
    beside = write(tmp_path / "scan" / "mine.txt")
    assert locate("scan/mine.txt", data).samefile(beside)
    pairs = "{kind='parallel', source='mine.txt', target='mine.txt'}"
    data = recipes.read_recipe("multi30k-en-de", [f"data.train={pairs}"]).data
    data = data.model_copy(update={"valid": None, "test": None})
    assert len(read(data.train, data, "train", 0)) == 1  # multi30k is not needed


def test_missing_data_is_one_line_with_the_command(tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 2, done.output
        return done.stderr.rstrip("\n")

    said = "data.sets: not on this machine: multi30k; run `anyformer data fetch multi30k`"
    assert refused("train", "multi30k-en-de") == said
    assert refused("train", "multi30k-en-de", "--dry-run") == said
    both = "data.sets: not on this machine: trec, sst2; run `anyformer data fetch trec sst2`"
    assert refused("train", "multitask") == both
    assert not (tmp_path / "runs").exists()
    wrong = refused("train", "scan", "data.test.path=scan/task_test_simple.txt")
    assert wrong.endswith("the data set scan has no such file; did you mean 'scan/tasks_test_simple.txt'?")
    assert refused("data", "fetch", "scna", "multi30k") == "'scna': no such data set; did you mean 'scan'?"


def test_fetch_from_a_mirror_on_the_command_line(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry(), "tiny", data_set())
    words = ["data", "fetch", "tiny", "tiny", "scan", "--mirror", str(lay_out(tmp_path / "mirror"))]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"tiny: {cache / 'tiny'} (licence: none)",
        f"scan: {cache / 'scan'} (licence: BSD (3 clauses))",
    ]
    monkeypatch.setenv("ANYFORMER_DATA", str(tmp_path / "data"))
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "data" / "tiny" / "part" / "packed.txt").is_file()
    failed = CliRunner().invoke(app, ["data", "fetch", "trec", "--mirror", str(tmp_path)])
    assert (failed.exit_code, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)
    assert failed.stderr.endswith("/TREC.train: cannot be read: No such file or directory\n")


def test_one_fetch_from_a_mirror_serves_every_recipe(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small files in place of the upstream ones."""
    for one in [one for one in registry().values() if not one.bundled]:
        files = []
        for file in one.files:
            text = f"{one.name}/{file.path}\n".encode()
            content = gzip.compress(text) if file.packed else text
            (tmp_path / "mirror" / one.address(file)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "mirror" / one.address(file)).write_bytes(content)
            sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            files.append(file.model_copy(update=sums))
        monkeypatch.setitem(registry(), one.name, one.model_copy(update={"files": tuple(files)}))
    for name in recipes.names():
        data = recipes.read_recipe(name).data
        if any(lookup(path) is None for _, path in named_files(data)):
            continue  # commands of a page make its files
        for one in data.sets:
            fetch(registry()[one], cache, str(tmp_path / "mirror"))
        for key, path in named_files(data):
            assert locate(path, data) == cache / path, key
            if not registry()[path.partition("/")[0]].bundled:
                assert (cache / path).read_text(encoding="utf-8") == f"{path}\n"
        fingerprint(data)


def test_a_damaged_package_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = registry()["scan"]
    changed = one.files[1].model_copy(update={"sha256": "0" * 64})
    with pytest.raises(ConfigError, match=r"tasks_test_simple\.txt\.xz: is damaged: install anyformer again"):
        storage.unpack(one, changed, cache)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "copy", full)
    with pytest.raises(ConfigError, match=r"scan: cannot be written: No space left on device; set XDG_CACHE_HOME or"):
        storage.find(SCAN)
    assert not cache.exists()


def test_several_processes_unpack_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 60)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=storage.find, args=(SCAN,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["tasks_test_simple.txt"]
