"""HTTP server for the page on 127.0.0.1, for browsers on this machine only.

A request must name this address as its host, which stops DNS rebinding, and must not come from a page of another site.
The page's content policy allows only its own script and requests to this server.
"""

import json
import secrets
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any

from anyformer.config import ConfigError, Fault
from anyformer.explore import film
from anyformer.explore.film import gif
from anyformer.explore.lessons import Lessons, judge, list_lessons, shipped_lessons
from anyformer.explore.open_runs import Workspace, views
from anyformer.explore.requests import GifRequest, TextRequest
from anyformer.explore.show import SERVED, collect, page, standalone

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 2**20
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


GRACE_SECONDS = 0.5  # for threads to end after their answer


class ExploreServer(ThreadingHTTPServer):
    """Server bound to a port, or to any free one if `port` is 0."""

    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # on Windows it would share a port that is in use

    def __init__(self, workspace: Workspace, port: int = 0, lessons: Lessons | None = None):
        self.workspace = workspace
        self.lessons = shipped_lessons() if lessons is None else lessons
        self.ending = False  # requests are refused and streams end
        self._answering, self._changed = 0, Condition()
        self._handlers: list[Thread] = []  # one for each connection
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "there is no such port"
            raise ConfigError([Fault("--port", f"= {port}: {why}; choose another one")]) from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread that `finish` can join."""
        thread = Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self._handlers = [*(old for old in self._handlers if old.is_alive()), thread]
        thread.start()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as active while the block runs."""
        with self._changed:
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        """Refuse new requests, wait up to `seconds` for active ones, and return whether all threads have ended.

        The interpreter must not exit earlier: a daemon thread inside torch's native code would abort it. Idle
        connections may stay open for long and are not waited for.
        """
        self.ending = True
        with self._changed:
            self._changed.wait_for(lambda: not self._answering, seconds)
        for thread in self._handlers:
            thread.join(GRACE_SECONDS / len(self._handlers))
        return not any(thread.is_alive() for thread in self._handlers)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors outside of request handling, except connections closed by the browser or Ctrl-C."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class RequestError(Exception):
    """A refused request, with its HTTP status and reason."""

    def __init__(self, status: HTTPStatus, why: str):
        super().__init__(why)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    server: ExploreServer
    server_version, sys_version = "anyformer", ""
    timeout = 60  # seconds without data from the browser

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self) -> None:
        match self.path.partition("?")[0]:
            case "/":
                nonce = secrets.token_urlsafe(16)
                policy = {"Content-Security-Policy": SERVED.format(nonce=nonce)}
                self._send(page(nonce), "text/html; charset=utf-8", headers=policy)
            case "/alone":
                policy = {"Content-Security-Policy": "default-src 'none'"}  # fetched as text, not displayed
                self._send(standalone(), "text/html; charset=utf-8", headers=policy)
            case "/api/runs":
                self._json(self.server.workspace.about())
            case _:
                raise RequestError(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _post(self) -> None:
        name = self.path.removeprefix("/api/")
        if name == "everything":
            fields = TextRequest(**self._request()).model_dump()
            self.server.workspace.answer("read", fields)  # raises if the text is wrong
            self._json(collect(self.server.workspace, {**fields, "off": sorted(fields["off"])}))
        elif name == "gif":
            self._send(gif(GifRequest(**self._request(film.MAX_REQUEST_BYTES))), "image/gif")
        elif name == "lessons":
            self._json(list_lessons(self.server.workspace, self.server.lessons, self._request()))
        elif name == "lesson":
            self._json(judge(self.server.workspace, self.server.lessons, self._request()))
        elif name in views():
            found = self.server.workspace.answer(name, self._request())
            self._lines(found) if isinstance(found, Iterator) else self._json(found)
        else:
            raise RequestError(HTTPStatus.NOT_FOUND, f"no view is called {name!r}")

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _answer(self, method: Any) -> None:
        with self.server.answering():
            try:
                self._check()
                method()
            except RequestError as error:
                self._json({"error": str(error)}, error.status)
            except (ConfigError, FloatingPointError) as error:
                self._json({"error": _line(error)}, HTTPStatus.BAD_REQUEST)
            except ConnectionError:
                raise
            except Exception as error:
                traceback.print_exc()
                self._json({"error": f"{type(error).__name__}: {_line(error)}"}, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _check(self) -> None:
        """Refuse requests from other hosts and other sites' pages."""
        if self.server.ending:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending")
        hosts = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        if self.headers.get("Host") not in hosts:
            raise RequestError(HTTPStatus.FORBIDDEN, f"this server answers only as {hosts[0]}")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in [f"http://{host}" for host in hosts]:
            raise RequestError(HTTPStatus.FORBIDDEN, "requests from pages of other sites are refused")

    def _request(self, limit: int = MAX_REQUEST_BYTES) -> dict[str, Any]:
        try:
            size = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            raise RequestError(HTTPStatus.BAD_REQUEST, "Content-Length is not a number") from None
        if not 0 <= size <= limit:
            for begin in range(0, min(size, 64 * MAX_REQUEST_BYTES), MAX_REQUEST_BYTES):  # a client reads after sending
                self.rfile.read(min(MAX_REQUEST_BYTES, size - begin))
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the limit is {limit:,} bytes")
        try:
            fields = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the request is not JSON") from None
        if not isinstance(fields, dict):
            raise RequestError(HTTPStatus.BAD_REQUEST, "the request must be an object")
        return fields

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        self._send(text, "application/json; charset=utf-8", status)

    def _send(
        self, content: str | bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
        self._begin(status, {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _lines(self, lines: Iterable[dict[str, Any]]) -> None:
        """Stream lines as they come; an error after the first line becomes the last line."""
        begun = False
        try:
            for line in lines:
                if not begun:
                    self._begin(HTTPStatus.OK, {"Content-Type": "application/x-ndjson; charset=utf-8"})
                    begun = True
                self._line(line)
                if self.server.ending:
                    return
        except (ConfigError, FloatingPointError) as error:
            if not begun:
                raise
            self._line({"error": _line(error)})

    def _line(self, value: dict[str, Any]) -> None:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
        self.wfile.write(text.encode("utf-8", "backslashreplace"))
        self.wfile.flush()

    def _begin(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _line(error: Exception) -> str:
    return "; ".join(str(error).splitlines())
