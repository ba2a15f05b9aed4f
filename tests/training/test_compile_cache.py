"""Compiled code in the user's cache folder."""

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch

from anyformer import presets
from anyformer.runs.processes import locked
from anyformer.training import compile_cache
from anyformer.training.compile_cache import (
    DIGESTS,
    SETTING,
    TRITON_SETTING,
    UNUSED_DAYS,
    CompileCache,
    find_compile_cache,
)

CPU = torch.device("cpu")
SMALL = presets.gpt2(depth=1, width=16, heads=2, vocab=32, length=16)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (SETTING, TRITON_SETTING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def find() -> CompileCache:
    cache = find_compile_cache(SMALL, CPU)
    assert cache is not None
    return cache


def filled() -> Path:
    """A recorded folder with a file in it and one in a folder of it."""
    cache = find()
    assert cache.hold()
    with cache.in_use():
        (cache.folder / "deep").mkdir()
        (cache.folder / "deep" / "kernel.so").write_bytes(b"code" * 100)
        (cache.folder / "graph").write_bytes(b"graph")
        cache.record()
    return cache.folder


def test_each_config_torch_device_and_source_has_a_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [find().folder, find().folder]
    other = find_compile_cache(presets.gpt2(depth=2, width=16, heads=2, vocab=32, length=16), CPU)
    assert other is not None
    folders.append(other.folder)
    monkeypatch.setattr(torch, "__version__", "9.9")
    folders.append(find().folder)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another CPU")
    folders.append(find().folder)
    (home / "kernels").mkdir()
    (home / "kernels" / "op.py").write_text("TALL = 64")
    monkeypatch.setattr(compile_cache, "PACKAGE", home)
    folders.append(find().folder)
    (home / "kernels" / "op.py").write_text("TALL = 32")
    folders.append(find().folder)
    assert folders[0] == folders[1]
    assert len({*folders}) == 6
    assert {folder.parent for folder in folders} == {home / "anyformer" / "compiled"}


def test_a_folder_of_the_user_is_used_as_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, str(home))
    assert find_compile_cache(SMALL, CPU) is None


def test_the_temporary_folder_of_torch_is_not_the_users(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes it to the environment when its compiler is loaded."""
    temporary = os.path.join(tempfile.gettempdir(), "torchinductor_somebody")
    monkeypatch.setenv(SETTING, temporary)
    cache = find()
    assert cache.hold()
    with cache.in_use():
        assert os.environ[SETTING] == str(cache.folder)
    assert os.environ[SETTING] == temporary


def test_torch_writes_into_the_folder_while_it_is_in_use(home: Path) -> None:
    cache = find()
    assert cache.hold()
    with cache.in_use():
        assert os.environ[SETTING] == str(cache.folder)
    assert SETTING not in os.environ


@pytest.mark.parametrize("given", [None, "torchinductor_me/triton/0", "mine"])
def test_triton_writes_there_too(given: str | None, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the folder is the user's; one that torch wrote to the environment earlier is not."""
    folder = None if given is None else str(Path(tempfile.gettempdir()) / given)
    if folder is not None:
        monkeypatch.setenv(TRITON_SETTING, folder)
    cache = find()
    assert cache.hold()
    with cache.in_use():
        within = os.environ[TRITON_SETTING]
    assert within == (folder if given == "mine" else str(cache.folder / "triton"))
    assert os.environ.get(TRITON_SETTING) == folder


def test_intact_code_is_kept(home: Path) -> None:
    folder = filled()
    again = find()
    assert again.hold()
    assert not again.damaged
    assert (folder / "deep" / "kernel.so").exists()
    again.held.close()


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "list cut", "list missing", "list of another kind"])
def test_damaged_code_is_removed(home: Path, damage: str) -> None:
    folder = filled()
    kernel, digests = folder / "deep" / "kernel.so", folder / DIGESTS
    match damage:
        case "cut":
            kernel.write_bytes(kernel.read_bytes()[:-1])
        case "changed":
            kernel.write_bytes(b"Code" + kernel.read_bytes()[4:])
        case "missing":
            kernel.unlink()
        case "list cut":
            digests.write_text(digests.read_text()[:-3])
        case "list missing":
            digests.unlink()
        case "list of another kind":
            digests.write_text("[1]")
    again = find()
    assert again.hold()
    assert again.damaged
    assert [*again.folder.iterdir()] == []
    again.held.close()


def test_folders_that_were_not_used_for_long_are_removed(home: Path) -> None:
    old, held, recent = (home / "anyformer" / "compiled" / name for name in ("old", "held", "recent"))
    for folder, days in ((old, UNUSED_DAYS + 1), (held, UNUSED_DAYS + 1), (recent, UNUSED_DAYS - 1)):
        folder.mkdir(parents=True)
        (folder / "graph").write_bytes(b"graph")
        os.utime(folder, (0, time.time() - days * 24 * 3600))
    long_training, cache = CompileCache(held), find()
    long_training.held.enter_context(locked(held.parent, name="held.lock"))
    assert cache.hold()
    assert {path.name for path in held.parent.iterdir() if path.is_dir()} == {"held", "recent", cache.folder.name}
    long_training.held.close()
    cache.held.close()


def test_a_folder_in_use_counts_as_recent(home: Path) -> None:
    folder = filled()
    os.utime(folder, (0, 0))
    again = find()
    assert again.hold()
    assert (folder / "graph").exists()
    assert folder.stat().st_mtime > time.time() - 60
    again.held.close()


def test_a_second_training_uses_another_folder(home: Path) -> None:
    first, second = find(), find()
    assert first.hold()
    assert not second.hold()
    first.held.close()
    assert second.hold()
    second.held.close()


def test_a_cache_that_cannot_be_written_is_not_used(home: Path) -> None:
    (home / "anyformer").write_text("a file where the folder would be")
    assert not find().hold()
