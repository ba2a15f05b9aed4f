"""A server with tiny runs of every shape, in a thread of the test's process."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import Bytes, LanguageModel
from anyformer.run import Run
from anyformer.serve.engine import Engine
from anyformer.serve.http.app import make_app
from anyformer.serve.http.limits import HttpLimits
from anyformer.serve.http.server import bind
from anyformer.serve.http.service import Service
from anyformer.serve.request import Limits
from tests.explore import made

# A language model over bytes: every constraint can be written.
TEMPLATE = """{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<eos>{% endfor %}\
{% if add_generation_prompt %}<bos>assistant: {% endif %}"""
BYTES = train_tokenizer(Bytes(), [])
made.RUNS.setdefault("bytes", (LanguageModel(), made.decoder(made.stack()), BYTES))
made.RUNS.setdefault("chat", (LanguageModel(), made.decoder(made.stack()), BYTES.with_chat({"default": TEMPLATE})))
NAMES = ("chat", "lm", "bytes", "pair", "cells", "embed", "classify", "entail", "several", "regress", "tag", "mlm")


KINDS = {"embed": "embed", "classify": "classify", "entail": "classify", "several": "classify", "tag": "tag"}
KINDS |= {"regress": "number", "mlm": "fill_mask"}


class EncodingEngine(Engine):
    """The engine, with encoders that read one text after the other by their tasks."""

    def __init__(self, runs: Mapping[str, Run], limits: Limits | None = None):
        super().__init__(runs, limits)
        for name, kind in KINDS.items():
            if name in self.models:
                self.models[name] = replace(self.models[name], kinds=(kind,))

    async def encode(self, kind: str, texts: list[str], model: str | None = None, **options: Any) -> list[Any]:
        run = self.models[model or ""].run
        assert run is not None
        return [self._item(kind, run, text, **options) for text in texts]

    def _item(self, kind: str, run: Run, text: str, k: int = 5) -> Any:
        match kind:
            case "embed":
                return np.array(json.loads(run.predict([text])[0]), dtype=np.float32)
            case "number":
                return float(run.predict([text])[0])
            case "tag":
                words = text.split("\t" if "\t" in text else " ")
                return list(zip(words, run.predict([text])[0].split(), [None] * len(words), strict=True))
            case "classify":
                best = run.predict([text])[0]
                return [(label, 0.9 if label in best.split(",") else 0.1) for label in run.spec.labels]
            case _:
                return [[(one.id, one.token, one.probability) for one in run.alternatives(text, k)]]


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
    runs = {name: made.made(name, Path("nowhere")) for name in names}
    service = Service(EncodingEngine(runs, engine), limits, **options)
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
