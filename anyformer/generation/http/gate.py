"""The outermost layer of the server: request ids, keys, limits on size, number and time, refusal while it closes."""

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anyformer.generation.http.errors import ApiError, of_exception
from anyformer.generation.http.service import Service

OPEN = {"/", "/health", "/ready", "/favicon.ico"}  # answered without a key: they hold nothing of the models
UNCOUNTED = OPEN | {"/metrics", "/version"}  # answered while the server is busy or closes
LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1"}
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger(__name__)


class SlowClient(Exception):
    """A client that takes no more of its response."""


class Gate:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        response = _Response(send, given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16), self.service)
        counted = scope["path"] not in UNCOUNTED
        self.service.active += counted
        try:
            self._check(scope["path"], headers)
            body = await self._read(headers, receive)
            await self.app(scope, _replay(body, receive), response.send)
        except ApiError as error:
            await error.response()(scope, receive, response.send)
        except SlowClient:
            log.info("%s: closed, the client does not read its response", response.id)
            raise
        except Exception as error:
            if response.begun:
                raise
            known = of_exception(error)
            if known is None:
                log.exception("%s %s failed", scope["method"], scope["path"])
                known = ApiError(500, f"internal error in request {response.id}; the server's log has more")
            await known.response()(scope, receive, response.send)
        finally:
            self.service.active -= counted
            route = getattr(scope.get("route"), "path", "other")
            self.service.responses[route, response.status] += 1

    def _check(self, path: str, headers: dict[str, str]) -> None:
        service = self.service
        if service.keys and path not in OPEN:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not _is_one_of(key.strip().encode("latin-1"), service.keys):
                raise ApiError(401, "send a key of this server: Authorization: Bearer KEY", code="invalid_api_key")
        if service.local and not service.keys:
            self._check_site(headers)
        if path in UNCOUNTED:
            return
        if service.closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if service.active > service.limits.requests:
            raise ApiError(429, f"{service.limits.requests} requests are being answered: try again later")

    @staticmethod
    def _check_site(headers: dict[str, str]) -> None:
        """Refuse requests from pages of other sites, which a browser on this machine may send (DNS rebinding)."""
        for name in ("host", "origin"):
            if name in headers and _host(headers[name]) not in LOCAL_HOSTS:
                raise ApiError(
                    403, f"{name.capitalize()} must be this machine: the server is for local use, without keys"
                )

    async def _read(self, headers: dict[str, str], receive: Receive) -> bytes:
        """Return the body, within the limits on size and time."""
        limits = self.service.limits
        too_large = ApiError(413, f"the body is larger than {limits.body:,} bytes", code="body_too_large")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limits.body:
            raise too_large
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ApiError(400, "the connection was closed before the body was complete")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limits.body:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive in {limits.body_seconds:g} s", code="timeout") from None


class _Response:
    """Sends a response with its request id; raises `SlowClient` if the client does not take it."""

    def __init__(self, send: Send, id: str, service: Service):
        self._send, self.id, self._seconds = send, id, service.limits.write_seconds
        self.status, self.begun = 0, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            more = [(b"x-request-id", self.id.encode()), (b"x-content-type-options", b"nosniff")]
            if message["status"] == 408:  # the rest of the body is not awaited
                more.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            raise SlowClient from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then what the connection gives."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _host(value: str) -> str | None:
    try:
        return urlsplit(value if "://" in value else f"//{value}").hostname
    except ValueError:
        return None


def _is_one_of(key: bytes, keys: Iterable[bytes]) -> bool:
    """Compare with all keys, in constant time."""
    return sum(hmac.compare_digest(key, known) for known in keys) > 0
