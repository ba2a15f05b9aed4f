"""Downloads against a local server that cuts connections, lies, refuses and vanishes."""

import errno
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anyformer.config.spec import ConfigError
from anyformer.data.datasets import download, storage
from anyformer.data.datasets.download import DownloadFailed, fetch
from anyformer.runs import processes
from tests.datasets.upstream import CONTENT, Server, assert_complete, data_set, lay_out, serving

WORDS = len(CONTENT["words.txt"])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(download, "CHUNK", 10_000)
    with serving(lay_out(tmp_path / "upstream")) as made:
        yield made


def partials(home: Path) -> list[Path]:
    return [path for path in (home / storage.PARTIAL).glob("*") if path.suffix != ".lock"]


def test_all_files_are_downloaded_once(server: Server, tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    folder = fetch(data_set(), tmp_path / "home", server.address, lambda *state: shown.append(state))
    assert folder == tmp_path / "home" / "tiny"
    assert_complete(tmp_path / "home")
    assert shown == sorted(shown)
    assert shown[0] == (0, data_set().bytes)
    assert shown[-1] == (data_set().bytes, data_set().bytes)
    assert [path for path, _ in server.requests] == [f"/{data_set().address(file)}" for file in data_set().files]
    fetch(data_set(), tmp_path / "home", server.address)
    assert len(server.requests) == 2  # nothing was missing


def test_a_cut_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.cut_after = WORDS // 3 + 1
    fetch(data_set(), tmp_path / "home", server.address)
    assert_complete(tmp_path / "home")
    starts = [start for path, start in server.requests if path.endswith("words.txt")]
    assert starts == [0, server.cut_after, 2 * server.cut_after]


def test_a_stopped_download_is_resumed_by_the_next_command(server: Server, tmp_path: Path) -> None:
    server.cut_after, server.cuts = 20_000, 1
    server.statuses = []
    fail = [lambda: server.statuses.extend([503] * download.ATTEMPTS)]

    def progress(done: int, total: int) -> None:
        if done >= 20_000 and fail:
            fail.pop()()

    with pytest.raises(DownloadFailed, match=r"words\.txt: the download was cut 5 times \(503 .*same command resumes$"):
        fetch(data_set(), tmp_path / "home", server.address, progress)
    assert [path.stat().st_size for path in partials(tmp_path / "home")] == [20_000]
    fetch(data_set(), tmp_path / "home", server.address)
    assert ("/" + data_set().address(data_set().files[0]), 20_000) in server.requests
    assert_complete(tmp_path / "home")


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges, server.cut_after, server.cuts = False, 20_000, 1
    fetch(data_set(), tmp_path / "home", server.address)
    assert_complete(tmp_path / "home")


@pytest.mark.parametrize("size", [0, 10, WORDS - 1, WORDS, WORDS + 10])
def test_whatever_an_earlier_download_left(server: Server, tmp_path: Path, size: int) -> None:
    """A left file that is not the beginning of the right one is found by its checksum and fetched anew."""
    partial = tmp_path / "home" / storage.PARTIAL / data_set().files[0].sha256
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * size)
    if 0 < size <= WORDS:
        with pytest.raises(DownloadFailed, match="SHA-256"):
            fetch(data_set(), tmp_path / "home", server.address)
    fetch(data_set(), tmp_path / "home", server.address)
    assert_complete(tmp_path / "home")


def test_a_wrong_checksum_is_refused_and_not_kept(server: Server, tmp_path: Path) -> None:
    upstream = tmp_path / "upstream" / data_set().address(data_set().files[0])
    upstream.write_bytes(CONTENT["words.txt"][:-1] + b"!")
    with pytest.raises(DownloadFailed, match=r"words\.txt: has the SHA-256 [0-9a-f]{64}, and [0-9a-f]{64} is expected"):
        fetch(data_set(), tmp_path / "home", server.address)
    assert not partials(tmp_path / "home")
    assert not (tmp_path / "home" / "tiny").exists()


def test_a_file_that_grew_or_shrank_is_refused(server: Server, tmp_path: Path) -> None:
    upstream = tmp_path / "upstream" / data_set().address(data_set().files[0])
    upstream.write_bytes(b"more\n" + CONTENT["words.txt"])
    with pytest.raises(DownloadFailed, match="SHA-256"):
        fetch(data_set(), tmp_path / "home", server.address)
    upstream.write_bytes(CONTENT["words.txt"][:-7])
    with pytest.raises(DownloadFailed, match="cut 5 times"):
        fetch(data_set(), tmp_path / "home", server.address)


def test_a_missing_file_is_not_tried_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [404]
    with pytest.raises(DownloadFailed, match=r"words\.txt: the server answers 404"):
        fetch(data_set(), tmp_path / "home", server.address)
    assert len(server.requests) == 1


def test_a_busy_server_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429, 500]
    fetch(data_set(), tmp_path / "home", server.address)
    assert_complete(tmp_path / "home")


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(DownloadFailed, match=r"^127.0.0.1:\d+ cannot be reached \(Connection refused\); check the"):
        fetch(data_set(), tmp_path / "home", address)

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DownloadFailed, match=r"^raw\.githubusercontent\.com cannot be reached .*--mirror DIR$"):
        fetch(data_set(), tmp_path / "home")


@pytest.mark.parametrize("packed", [False, True])
def test_a_full_disk_is_one_line_and_leaves_no_part(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if packed:
            patch.setattr(storage, "copy", full)
        else:
            patch.setattr(os, "fsync", full)
        with pytest.raises(DownloadFailed, match=r"tiny: cannot be written: No space left on device \(0\.1 MB are"):
            fetch(data_set(), tmp_path / "home", server.address)
    assert (tmp_path / "home" / "tiny" / "words.txt").exists() == packed
    assert not (tmp_path / "home" / "tiny" / "part" / "packed.txt").exists()
    fetch(data_set(), tmp_path / "home", server.address)
    assert_complete(tmp_path / "home")


def test_a_mirror_is_a_folder_too(tmp_path: Path) -> None:
    fetch(data_set(), tmp_path / "home", str(lay_out(tmp_path / "거울 鏡")))
    assert_complete(tmp_path / "home")
    with pytest.raises(DownloadFailed, match=r"words\.txt: cannot be read: No such file or directory"):
        fetch(data_set(), tmp_path / "other", str(tmp_path / "empty"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ConfigError, match="is not a folder"):
        fetch(data_set(), tmp_path / "home", str(lay_out(tmp_path / "mirror")))


def test_two_processes_fetch_at_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 60)
    server.cut_after = 7_000  # a download of many requests
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fetch, args=(data_set(), tmp_path / "home", server.address)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert_complete(tmp_path / "home")
    assert len(server.requests) == len(set(server.requests))  # no byte was fetched twice


def test_a_long_wait_for_another_process_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 0.0)
    home, held = tmp_path / "home", threading.Event()

    def hold() -> None:
        with processes.locked(home / storage.PARTIAL, f"{data_set().files[0].sha256}.lock"):
            held.set()
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with pytest.warns(UserWarning, match=r"tiny/words\.txt: waiting for process \d+ on "):
        fetch(data_set(), home, str(lay_out(tmp_path / "mirror")))
    thread.join()
    assert_complete(home)
