"""State that all endpoints share: the engine, its models with their texts, limits and counters."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from starlette.requests import ClientDisconnect, Request

from anyformer.config import ConfigError, IdInput, ModelConfig
from anyformer.data.chat_template import ChatTemplate
from anyformer.data.media import REFERENCE
from anyformer.data.media_files import is_media_file
from anyformer.data.tokenizer import TextTokenizer
from anyformer.generation.constraints.constraint import Constraint
from anyformer.generation.engine.engine import Engine
from anyformer.generation.engine.interface import EncodeKind, Model
from anyformer.generation.http.bodies import GenerationBody, JsonObject, JsonSchemaFormat, StructuredOutputs
from anyformer.generation.http.errors import ApiError, unknown_model
from anyformer.generation.http.limits import HttpLimits
from anyformer.runs.run import Run
from anyformer.tasks.base import Writer, ending_ids, media_of
from anyformer.tasks.output_constraints import OutputConstraints, tokenise

T = TypeVar("T")

ANY_OBJECT = {"type": "object", "additionalProperties": {}}


class ServedRun:
    """One model, or a LoRA adapter of one, with what its texts need; computed once."""

    def __init__(self, model: Model, run: Run, adapter: str | None = None):
        self.model, self.run, self.adapter = model, run, adapter
        self.name = adapter or model.name  # in requests

    @property
    def config(self) -> ModelConfig:
        return self.run.config

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.run.tokenizer

    @cached_property
    def writer(self) -> Writer:
        return self.run.writer()

    @property
    def answers_sources(self) -> bool:
        """True for an encoder–decoder, which answers a source."""
        return self.config.encoder is not None

    @property
    def several_labels(self) -> bool:
        """True if a text may have any number of labels."""
        spec = self.run.spec
        return bool(getattr(spec, "separator", None) or getattr(spec, "multi_label", False))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The endpoints that the model can answer, by name."""
        able, found = set(self.model.kinds), list[str]()
        if "generate" in able:
            found += ["completions"] + ["chat"] * (self.chat is not None)
        if "search" in able and not self.writer.continues:
            found.append("translate")
        names = {"embed": "embeddings", "classify": "classify", "tag": "tag", "fill_mask": "fill-mask"}
        found += [name for kind, name in names.items() if kind in able]
        pairs = "embed" in able or (able & {"classify", "number"} and getattr(self.run.spec, "pairs", False))
        return (*found, *(["score", "rerank"] if pairs else []))

    @property
    def chat(self) -> ChatTemplate | None:
        return self.run.chat_template

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the prompt of a conversation."""
        if self.chat is None:
            what = "has no chat template: use /v1/completions, or a run imported with one"
            raise ApiError(400, f"{self.name} {what}", param="model", code="no_chat_template")
        return self.chat.encode(messages)

    @cached_property
    def chat_stop(self) -> tuple[int, ...]:
        """The ids that end a message."""
        end = None if self.chat is None else self.chat.end_of_turn
        return tuple(dict.fromkeys((*self.stop, *([] if end is None else [end]))))

    @cached_property
    def stop(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return tuple(ending_ids(self.tokenizer, self.config))

    def constraint(self, constraints: OutputConstraints, stop: Sequence[int], alone: bool) -> Constraint | None:
        """Return constraints on texts as one on ids, with what its first token needs."""
        assert self.model.vocabulary is not None
        constraint = tokenise(constraints, self.tokenizer, self.model.vocabulary, stop, alone).constraint
        if constraint is not None:
            constraint.allowed_within(torch.tensor([constraint.start()]), torch.tensor([2**30]))
        return constraint

    @cached_property
    def spelling(self) -> list[bytes]:
        """The bytes of each token; those of special tokens are their names."""
        table = self.tokenizer.vocabulary_bytes()
        return [raw or self.tokenizer.token(i).encode("utf-8", "backslashreplace") for i, raw in enumerate(table)]

    def bytes_of(self, id: int) -> bytes:
        return self.spelling[id] if id < len(self.spelling) else f"<{id}>".encode()

    def text_of(self, id: int) -> str:
        """Return a token as text, or as `bytes:\\xe2\\x80` where it is no whole character."""
        raw = self.bytes_of(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def check_texts(self, texts: Sequence[str], field: str, blank: bool = False) -> None:
        """Refuse blank texts, and references to files: no name from a request reaches the file system."""
        read = self.config.source or self.config.target
        media = media_of(self.run.task)
        if not isinstance(read, IdInput) or (media is not None and media.required):
            raise ApiError(400, f"{self.name} reads images or sounds, which this server does not accept", param=field)
        for i, text in enumerate(texts):
            where = f"{field}.{i}" if len(texts) > 1 else field
            if not blank and not text.strip():
                raise ApiError(400, f"{where}: is blank", param=field)
            named = REFERENCE.search(text) or any(is_media_file(cell.strip()) for cell in text.split("\t"))
            if named and media is not None:
                raise ApiError(400, f"{where}: references to files are refused over HTTP", param=field)


class Service:
    """The state of a server."""

    def __init__(self, engine: Engine, limits: HttpLimits | None = None, keys: Sequence[str] = (), local: bool = True):
        """With `keys`, requests must carry one. A `local` server without keys refuses pages of other sites."""
        self.engine, self.limits = engine, limits or HttpLimits()
        self.keys, self.local = tuple(key.encode() for key in keys), local
        self.started = int(time.time())
        self.closing = False
        self.active = self.streams = 0
        self.responses: Counter[tuple[str, int]] = Counter()  # by path and status
        self.runs: dict[str, ServedRun] = {}
        for model in engine.models.values():
            for adapter in (None, *model.adapters):
                assert model.run is not None
                one = ServedRun(model, model.run, adapter)
                self.runs[one.name] = one

    def find(self, name: str | None, *kinds: str) -> ServedRun:
        """Return a model by name; one of some kinds, if given."""
        if name is None:
            able = [run for run in self.runs.values() if not kinds or set(kinds) & set(run.model.kinds)]
            if len(able) != 1:
                what = "is missing: several models are served" if able else "is missing: no model can do this"
                raise ApiError(400, f"model: {what}; known: {', '.join(self.runs)}", param="model")
            return able[0]
        if name not in self.runs:
            raise unknown_model(name, list(self.runs))
        run = self.runs[name]
        if kinds and not set(kinds) & set(run.model.kinds):
            can = ", ".join(run.model.kinds) or "nothing that this server offers"
            raise ApiError(400, f"{name} cannot do this; it can: {can}", param="model", code="unsupported")
        return run

    async def encode(self, kind: EncodeKind, texts: list[str], run: ServedRun, **options: Any) -> list[Any]:
        return (await self.encode_counted(kind, texts, run, **options))[0]

    async def encode_counted(
        self, kind: EncodeKind, texts: list[str], run: ServedRun, **options: Any
    ) -> tuple[list[Any], int]:
        """Return one item per text, and how many tokens the model read."""
        if len(texts) > self.limits.texts:
            raise ApiError(400, f"there are {len(texts)} texts, and the limit is {self.limits.texts}", param="input")
        return await self.engine.encode_counted(kind, texts, run.model.name, **options)

    async def constraint(
        self, run: ServedRun, body: GenerationBody, stop: Sequence[int], alone: bool
    ) -> Constraint | None:
        """Return the constraint of a request's format or structured output, for answers that end by `stop`."""
        field = "response_format" if body.structured_outputs is None else "structured_outputs"
        if (constraints := _constraints(body)) is None:
            return None
        if body.ignore_eos:
            raise ApiError(400, "ignore_eos: a constrained answer ends where it is complete", param="ignore_eos")
        if body.stop:
            raise ApiError(400, "stop: would cut off what the format requires: leave it out", param="stop")
        try:
            return await asyncio.to_thread(run.constraint, constraints, stop, alone)
        except ConfigError as error:
            raise ApiError(400, "; ".join(str(error).splitlines()), param=field) from None

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Count a stream while it lasts."""
        if self.streams >= self.limits.streams:
            raise ApiError(429, f"{self.streams} answers are being streamed already: try again later")
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of some work; cancel it if the client closes the connection."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _constraints(body: GenerationBody) -> OutputConstraints | None:
    """Return what a request demands of the text of its answers."""
    found: list[OutputConstraints] = []
    match body.response_format:
        case JsonObject():
            found.append(OutputConstraints(json_schema=ANY_OBJECT))
        case JsonSchemaFormat(json_schema=named):
            found.append(OutputConstraints(json_schema=named.schema_))
    match body.structured_outputs:
        case StructuredOutputs(choice=choice, regex=regex, json_=schema):
            if sum(one is not None for one in (choice, regex, schema)) != 1:
                what = "structured_outputs: give one of choice, regex and json"
                raise ApiError(400, what, param="structured_outputs")
            found.append(OutputConstraints(choices=choice, regex=regex, json_schema=schema))
    if len(found) > 1:
        raise ApiError(400, "response_format and structured_outputs both define the answer: give one of them")
    return found[0] if found else None
