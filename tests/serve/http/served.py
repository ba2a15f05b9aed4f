"""A server with tiny runs of every shape, in a thread of the test's process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from anyformer.data.tokenizer import train_tokenizer
from anyformer.generation.engine.engine import Engine
from anyformer.generation.engine.interface import Limits
from anyformer.generation.http.app import make_app
from anyformer.generation.http.limits import HttpLimits
from anyformer.generation.http.server import bind
from anyformer.generation.http.service import Service
from anyformer.recipe import Bytes, LanguageModel
from anyformer.runs.run import Run
from tests.explore import made
from tests.serve.responsive import make_run

# A language model over bytes: every constraint can be written.
TEMPLATE = """{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<eos>{% endfor %}\
{% if add_generation_prompt %}<bos>assistant: {% endif %}"""
BYTES = train_tokenizer(Bytes(), [])
made.RUNS.setdefault("bytes", (LanguageModel(), made.decoder(made.stack()), BYTES))
made.RUNS.setdefault("chat", (LanguageModel(), made.decoder(made.stack()), BYTES.with_chat({"default": TEMPLATE})))
NAMES = ("chat", "lm", "bytes", "pair", "cells", "embed", "classify", "entail", "several", "regress", "tag", "mlm")


class Server:
    """A running server and a client of it."""

    def __init__(self, service: Service, address: str):
        self.service, self.address = service, address
        self.client = httpx.Client(base_url=address, timeout=60)

    def run(self, name: str) -> Run:
        run = self.service.engine.models[name].run
        assert run is not None
        return run

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def ok(self, path: str, **body: Any) -> Any:
        """Return the JSON of a response that must be 200."""
        found = self.post(path, **body)
        assert found.status_code == 200, found.text
        return found.json()

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """Return the error of a response with a status."""
        found = self.post(path, **body)
        assert found.status_code == status, found.text
        error: dict[str, Any] = found.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


@contextmanager
def serving(
    names: tuple[str, ...] = NAMES, limits: HttpLimits | None = None, engine: Limits | None = None, **options: Any
) -> Iterator[Server]:
    """Serve some runs on a free port."""
    runs = {name: make_run(name) for name in names}
    with serving_engine(Engine(runs, engine), limits, **options) as server:
        yield server


@contextmanager
def serving_engine(engine: Engine, limits: HttpLimits | None = None, **options: Any) -> Iterator[Server]:
    service = Service(engine, limits, **options)
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="warning", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    one = Server(service, f"http://127.0.0.1:{listening.getsockname()[1]}")
    try:
        while not server.started and thread.is_alive():
            threading.Event().wait(0.01)
        yield one
    finally:
        one.client.close()
        server.should_exit = True
        thread.join()
