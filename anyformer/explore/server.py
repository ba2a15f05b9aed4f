"""The page and its answers on 127.0.0.1, for this machine's browser alone.

A request must name this address as its host, so that no other name that was made to point here can read anything, and
must not come from another site's page. The page may run its own script and ask this server; nothing else.
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
from anyformer.explore import page_bundle as assemble
from anyformer.explore.open_runs import VIEWS, Explored
from anyformer.explore.requests import AboutText
from anyformer.explore.show import collect

HOST = "127.0.0.1"
LARGEST = 2**20  # bytes of a request
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


GRACE = 0.5  # seconds for threads to end after their answer


class Server(ThreadingHTTPServer):
    """Bound to a port, or to a free one where that is 0; `serve_forever` answers."""

    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # there it would share a port that is in use

    def __init__(self, explored: Explored, port: int = 0):
        self.explored = explored
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
        """Answer a connection in a thread that `finish` knows."""
        thread = Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self._handlers = [*(old for old in self._handlers if old.is_alive()), thread]
        thread.start()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count the request that runs in the block as being answered."""
        with self._changed:
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()

    def finish(self, seconds: float) -> bool:
        """Answer nothing more, wait that many seconds for requests, and return whether all threads have ended.

        The interpreter must not exit before: a daemon thread that is in torch's native code then aborts it, also while
        the thread itself ends. A connection without a request may stay open for long: it is not waited for.
        """
        self.ending = True
        with self._changed:
            self._changed.wait_for(lambda: not self._answering, seconds)
        for thread in self._handlers:
            thread.join(GRACE / len(self._handlers))
        return not any(thread.is_alive() for thread in self._handlers)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what goes wrong outside of answers, but not a connection that the browser or Ctrl-C closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Refused(Exception):
    """A request that is not answered, and why."""

    def __init__(self, status: HTTPStatus, why: str):
        super().__init__(why)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "anyformer", ""
    timeout = 60  # seconds without a word from the browser

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self) -> None:
        match self.path.partition("?")[0]:
            case "/":
                nonce = secrets.token_urlsafe(16)
                policy = {"Content-Security-Policy": assemble.SERVED.format(nonce=nonce)}
                self._send(assemble.page(nonce), "text/html; charset=utf-8", headers=policy)
            case "/alone":
                nothing = {"Content-Security-Policy": "default-src 'none'"}  # it is fetched as text, not shown
                self._send(assemble.alone(), "text/html; charset=utf-8", headers=nothing)
            case "/api/runs":
                self._json(self.server.explored.about())
            case _:
                raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _post(self) -> None:
        name = self.path.removeprefix("/api/")
        if name == "write":
            self._lines(self.server.explored.write(self._request()))
        elif name == "everything":
            asked = AboutText(**self._request()).model_dump(exclude={"step"})
            self.server.explored.answer("read", asked)  # raises what is wrong with the text
            self._json(collect(self.server.explored, {**asked, "off": sorted(asked["off"])}))
        elif name in VIEWS or name == "live":
            self._json(self.server.explored.answer(name, self._request()))
        else:
            raise Refused(HTTPStatus.NOT_FOUND, f"no view is called {name!r}")

    # -- small steps --------------------------------------------------------------------------------------------------

    def _answer(self, method: Any) -> None:
        with self.server.answering():
            self._answer_counted(method)

    def _answer_counted(self, method: Any) -> None:
        try:
            self._check()
            method()
        except Refused as error:
            self._json({"error": str(error)}, error.status)
        except (ConfigError, FloatingPointError) as error:
            self._json({"error": _line(error)}, HTTPStatus.BAD_REQUEST)
        except ConnectionError:
            raise
        except Exception as error:
            traceback.print_exc()
            self._json({"error": f"{type(error).__name__}: {_line(error)}"}, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _check(self) -> None:
        """This machine's browser, and no other site's page."""
        if self.server.ending:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending")
        hosts = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        if self.headers.get("Host") not in hosts:
            raise Refused(HTTPStatus.FORBIDDEN, f"this is {hosts[0]}, and answers to no other name")
        origin = self.headers.get("Origin")
        if origin is not None and origin not in [f"http://{host}" for host in hosts]:
            raise Refused(HTTPStatus.FORBIDDEN, "pages of other sites are not answered")

    def _request(self) -> dict[str, Any]:
        try:
            size = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, "Content-Length is no number") from None
        if not 0 <= size <= LARGEST:
            for begin in range(0, min(size, 64 * LARGEST), LARGEST):  # or it would not hear the answer
                self.rfile.read(min(LARGEST, size - begin))
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {LARGEST:,} bytes")
        try:
            found = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError):
            raise Refused(HTTPStatus.BAD_REQUEST, "the request is not JSON") from None
        if not isinstance(found, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "the request must be an object")
        return found

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        self._send(text, "application/json; charset=utf-8", status)

    def _send(
        self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None
    ) -> None:
        body = text.encode("utf-8", "backslashreplace")
        self._begin(status, {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _lines(self, lines: Iterable[dict[str, Any]]) -> None:
        """One line at a time, as they come; what goes wrong after the first is the last line."""
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
