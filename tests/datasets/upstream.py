"""A small data set, and a local HTTP server of its upstream files that can misbehave."""

import gzip
import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from anyformer.data.datasets.registry import DataSet, UpstreamFile

CONTENT = {
    "words.txt": "가나다 라마바 漢字\n".encode() * 5_000,
    "part/packed.txt": gzip.compress(b"unpacked text\n" * 1_000, mtime=0),
}


def data_set() -> DataSet:
    files = tuple(
        UpstreamFile(
            path=path,
            at=f"raw/{path}.gz" if "packed" in path else f"raw/{path}",
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )
        for path, content in CONTENT.items()
    )
    return DataSet(name="tiny", about="a few words", licence="none", repository="o/r", commit="0" * 40, files=files)


def lay_out(folder: Path) -> Path:
    """Write the upstream files to a folder as a mirror has them."""
    one = data_set()
    for file in one.files:
        path = folder / one.address(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CONTENT[file.path])
    return folder


def assert_complete(home: Path) -> None:
    """Assert that the files of the data set are in their places, and nothing else is below `home`."""
    found = {path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*") if path.is_file()}
    unpacked = {"tiny/part/packed.txt": gzip.decompress(CONTENT["part/packed.txt"])}
    assert found == {"tiny/words.txt": CONTENT["words.txt"], **unpacked}


@dataclass
class Server:
    """What the server does wrong, and the requests that it got: path and first byte."""

    folder: Path
    address: str = ""
    cut_after: int | None = None  # bytes of each answer before the connection closes
    cuts: int = 10**6  # how many answers are cut
    ranges: bool = True
    statuses: list[int] = field(default_factory=list)  # of the next answers
    requests: list[tuple[str, int]] = field(default_factory=list)

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        start = int(wanted[1]) if wanted and self.ranges else 0
        self.requests.append((handler.path, start))
        path = self.folder / handler.path.lstrip("/")
        if self.statuses:
            handler.send_error(self.statuses.pop(0))
        elif not path.is_file():
            handler.send_error(404)
        elif start >= len(content := path.read_bytes()):
            handler.send_error(416)
        else:
            handler.send_response(206 if start else 200)
            if start:
                handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            handler.send_header("Content-Length", str(len(content) - start))
            handler.end_headers()
            stop = len(content)
            if self.cut_after is not None and self.cuts > 0:
                stop, self.cuts = start + self.cut_after, self.cuts - 1
            handler.wfile.write(content[start:stop])


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server.address = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        listening.shutdown()
        thread.join()
