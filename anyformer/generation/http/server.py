"""The process: sockets, signals, and the end of a server that is still answering."""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.http.app import make_app
from anyformer.generation.http.service import Service

KEEP_ALIVE_SECONDS = 30
MIN_KEY = 16  # characters of a key
POLL_SECONDS = 0.05


def read_keys(file: Path) -> list[str]:
    """Return the keys of a file: one per line; blank lines and lines with # are skipped."""
    lines = file.read_text(encoding="utf-8").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError([Fault("--api-key-file", f"{file} has no key: write one per line")])
    if any(len(key) < MIN_KEY or not key.isascii() or " " in key for key in keys):
        what = f"a key must have at least {MIN_KEY} ASCII characters and no spaces"
        raise ConfigError([Fault("--api-key-file", f"{file}: {what}; make one by: openssl rand -hex 32")])
    return keys


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host's name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else "there is no such port"
        raise ConfigError([Fault("--port", f"= {port} at {host}: {why}; choose another one")]) from None


def serve(service: Service, listening: socket.socket, started: Callable[[], None]) -> None:
    """Answer requests until a signal comes and those that are running have finished.

    The first SIGTERM or SIGINT refuses new requests with 503; the second ends the process at once.
    """
    config = uvicorn.Config(
        make_app(service),
        http=_protocol(service.limits.header_seconds),
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=None,
    )
    asyncio.run(_serve(_Server(config), service, listening, started))


async def _serve(server: "_Server", service: Service, listening: socket.socket, started: Callable[[], None]) -> None:
    closer: list[asyncio.Task[None]] = []

    def take() -> None:
        if service.closing:
            os._exit(1)
        service.closing = True
        closer.append(asyncio.create_task(_close(server, service)))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, take)
    running = asyncio.create_task(server.serve([listening]))
    while not server.started and not running.done():
        await asyncio.sleep(POLL_SECONDS)
    if server.started:
        started()
    await running


async def _close(server: "_Server", service: Service) -> None:
    """Let running requests finish; new ones are refused meanwhile."""
    while service.active:
        await asyncio.sleep(POLL_SECONDS)
    server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_serve`."""
        yield


def _protocol(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol, with a deadline for the header of a request."""

    class Protocol(H11Protocol):
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait()

        def _wait(self) -> None:
            """Start the deadline where a header is due, and end it where it has come."""
            due = self._is_due()
            if due and self.deadline is None:
                self.deadline = self.loop.call_later(seconds, self._expire)
            elif not due and self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

        def _expire(self) -> None:
            self.deadline = None
            if self._is_due():
                self.transport.close()

        def _is_due(self) -> bool:
            cycle: Any = self.cycle  # None before the first request
            return cycle is None or cycle.response_complete

        def connection_lost(self, exc: Exception | None) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
            super().connection_lost(exc)

    return Protocol
