"""Downloads of data sets: upstream files by HTTP or from a mirror, resumed after a cut, verified by SHA-256."""

import http.client
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from anyformer import __version__
from anyformer.config.spec import visible
from anyformer.data.datasets.registry import HOST, DataSet, UpstreamFile
from anyformer.data.datasets.storage import CHUNK, placing, sha256_of, unpack

ATTEMPTS = 5  # in a row that bring no byte, before a download fails
FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled before each further one
TIMEOUT = 30.0  # seconds without a byte
BUSY = (408, 425, 429, 500, 502, 503, 504)  # HTTP status codes after which another attempt may succeed

Progress = Callable[[int, int], None]  # called with the finished and the total bytes


class DownloadFailed(Exception):
    """A file could not be downloaded, verified or written; the message is one line."""


class _Cut(Exception):
    """A connection that ended early: the next attempt continues where it stopped."""


def fetch(data_set: DataSet, home: Path, mirror: str = HOST, progress: Progress = lambda done, total: None) -> Path:
    """Bring the missing files of a data set to its folder below `home`, and return the folder.

    `mirror` is an address or a folder in which files lie as OWNER/REPOSITORY/COMMIT/PATH. Files of bundled data sets
    come from the package.
    """
    done, total = 0, data_set.bytes
    for file in data_set.files:
        progress(done, total)
        if data_set.bundled:
            unpack(data_set, file, home)
        else:
            before = done
            _bring(data_set, file, home, mirror, lambda size, before=before: progress(before + size, total))  # type: ignore[misc]
        done += file.bytes
    progress(done, total)
    return home / data_set.name


def _bring(data_set: DataSet, file: UpstreamFile, home: Path, mirror: str, progress: Callable[[int], None]) -> None:
    """Download a file, verify it and move it to its place."""
    try:
        with placing(data_set, file, home) as partial:
            if partial is None:
                return
            address = f"{mirror.rstrip('/')}/{data_set.address(file)}"
            _download(address, file.bytes, partial, progress)
            if (found := sha256_of(partial)) != file.sha256:
                partial.unlink()
                what = f"has the SHA-256 {found}, and {file.sha256} is expected: it was changed or damaged"
                raise DownloadFailed(f"{visible(address)}: {what}; it is not kept")
    except OSError as error:
        where = visible(str(home / data_set.name))
        why = f"cannot be written: {error.strerror or error} ({data_set.bytes / 1e6:,.1f} MB are needed)"
        raise DownloadFailed(f"{where}: {why}; the same command resumes") from None


def _download(address: str, size: int, partial: Path, progress: Callable[[int], None]) -> None:
    """Bring the bytes that are missing in `partial`, in as many attempts as bring any."""
    attempts = 0
    while (before := _length(partial)) != size:
        try:
            _attempt(address, size, partial, progress)
        except _Cut as cut:
            attempts = 0 if _length(partial) > before else attempts + 1
            if attempts == ATTEMPTS:
                what = f"the download was cut {ATTEMPTS} times ({cut})"
                raise DownloadFailed(f"{visible(address)}: {what}; the same command resumes") from None
            if attempts:
                time.sleep(FIRST_PAUSE * 2 ** (attempts - 1))


def _attempt(address: str, size: int, partial: Path, progress: Callable[[int], None]) -> None:
    """Append what a server sends to `partial`, or replace it if the server does not continue where it ends."""
    have = _length(partial)
    if have > size:
        have = 0
    content, start = _open(address, have)
    with content, partial.open("r+b" if start else "wb") as out:
        out.truncate(out.seek(start))
        while start < size and (piece := _read(content, min(CHUNK, size - start))):
            out.write(piece)
            start += len(piece)
            progress(start)
        out.flush()
        os.fsync(out.fileno())
    if start < size:
        raise _Cut(f"it ended after {start:,} of {size:,} bytes")


def _read(content: IO[bytes], count: int) -> bytes:
    try:
        return content.read(count)
    except (OSError, http.client.HTTPException) as error:
        raise _Cut(_reason(error)) from None


def _open(address: str, start: int) -> tuple[IO[bytes], int]:
    """Open an address from a byte on, and return the byte at which its answer starts: 0 if it cannot resume."""
    if not re.match("https?://", address):
        try:
            file = open(os.path.expanduser(address), "rb")  # noqa: SIM115  the caller closes it
        except OSError as error:
            raise DownloadFailed(f"{visible(address)}: cannot be read: {error.strerror}") from None
        return file, file.seek(start)
    request = urllib.request.Request(urllib.parse.quote(address, safe=":/%"))
    request.add_header("User-Agent", f"anyformer/{__version__}")
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        answer = cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT))
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the server has fewer bytes than `start`
            return _open(address, 0)
        if error.code in BUSY:
            raise _Cut(f"{error.code} {error.reason}") from None
        raise DownloadFailed(f"{visible(address)}: the server answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, socket.gaierror | ConnectionRefusedError | ssl.SSLCertVerificationError):
            host = urllib.parse.urlsplit(address).netloc
            hint = "check the network, or take the files from a folder with --mirror DIR"
            raise DownloadFailed(f"{visible(host)} cannot be reached ({_reason(error.reason)}); {hint}") from None
        raise _Cut(_reason(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Cut(_reason(error)) from None
    resumes = answer.status == 206 and (answer.headers["Content-Range"] or "").startswith(f"bytes {start}-")
    return cast(IO[bytes], answer), start if resumes else 0


def _reason(error: object) -> str:
    """Return an error of the network in a few words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
