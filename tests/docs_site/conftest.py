"""The site that `make docs` has built, on a plain folder server, and a Chromium."""

import http.server
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

SITE = Path(__file__).parent.parent.parent / "site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A folder server that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def site() -> Path:
    assert (SITE / "index.html").exists(), "build the site first: make docs"
    return SITE


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
