"""The engine: takes requests from asyncio, runs all models in one thread, and returns events."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, cast

from anyformer.generation.engine.adapters import share_body
from anyformer.generation.engine.admission import check_served, limits_of, longest_text
from anyformer.generation.engine.encoders import EncodeServer, ScoreJob, TextJob
from anyformer.generation.engine.interface import (
    NOT_FOUND,
    BeamHypothesis,
    Closing,
    EncodeKind,
    Event,
    Failed,
    Finished,
    Limits,
    Model,
    QueueFull,
    Token,
    UnknownModel,
    Unsupported,
    WholeAnswer,
)
from anyformer.generation.engine.outbox import Outbox, Server
from anyformer.generation.engine.paged_server import PagedServer
from anyformer.generation.engine.sequence import Item, Mailbox, Sequence, TokenIds
from anyformer.generation.engine.sequence_pages import is_paged
from anyformer.generation.engine.serial import SerialServer
from anyformer.generation.engine.stats import Stats
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam, Sampling
from anyformer.nn.model import Transformer
from anyformer.nn.uncached import check_parts
from anyformer.runs.run import Run

log = logging.getLogger(__name__)


class Engine:
    """Serves one run or several, by name.

    All models run in one thread, which the engine starts and ends. Its methods are for one event loop or several.
    A bare model in place of a run reads and writes ids only.

    Args:
        runs: one run or model, or several by their names.
        limits: rows, pages, lengths of the queue and other limits; None: the defaults.
        adapters: for the name of a model, runs with LoRA adapters of its weights, by name.

    Raises:
        UnknownModel: adapters are given for a model that is not served.
        ConfigError: an adapter does not fit the weights of its model.

    Example:
        >>> import asyncio
        >>> from anyformer.generation.api import Request
        >>> model = af.Transformer(af.presets.gpt2(depth=1, width=16, heads=2, vocab=11))
        >>> async def main():
        ...     async with af.Engine(model) as engine:
        ...         async for event in engine.submit(Request(torch.tensor([[1, 2]]), max_new_tokens=2)):
        ...             print(type(event).__name__)
        >>> asyncio.run(main())
        Token
        Token
        Finished
    """

    def __init__(
        self,
        runs: Run | Transformer | Mapping[str, Run | Transformer],
        limits: Limits | None = None,
        adapters: Mapping[str, Mapping[str, Run | Transformer]] | None = None,
    ):
        self.limits = limits or Limits()
        named = runs if isinstance(runs, Mapping) else {_name(runs): runs}
        adapters = adapters or {}
        if unknown := [name for name in adapters if name not in named]:
            raise UnknownModel(f"adapters of {unknown[0]!r}: no such model; known: {', '.join(named)}")
        self.models = {
            name: _describe(name, run, tuple(adapters.get(name, ())), self.limits) for name, run in named.items()
        }
        self._bodies = {name: _model(run).eval() for name, run in named.items()}
        self._servers, self._serial = dict[str, Server](), dict[str, SerialServer]()
        for name, run in named.items():
            self._serve(name, run, adapters.get(name, {}))
        self._encoders = {
            name: EncodeServer(run, self.limits.encode_tokens, self._servers[name].stats)
            for name, run in named.items()
            if isinstance(run, Run)
        }
        self._inbox: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._open = self._drain = False
        self._thread: threading.Thread | None = None

    def _serve(self, name: str, run: Run | Transformer, adapters: Mapping[str, Run | Transformer]) -> None:
        """Make the servers of a model: one with pages, where its state is paged, and one for the other requests."""
        body, cache, marked = self._bodies[name], self.limits.cache, _is_marked(run)
        models = {key: share_body(key, body, _model(adapted)) for key, adapted in adapters.items()}
        if body.decoder is not None and cache != "none":
            check_parts(body, "is served with it: use cache = 'none', or")
        self._servers[name] = self._serial[name] = serial = SerialServer(body, marked, cache, models)
        if not marked and cache != "none" and is_paged(body):
            self._servers[name] = paged = PagedServer(body, self.limits, models)
            serial.stats = paged.stats

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that runs the models. `async with` does it, and closes the engine at its end.

        Raises:
            Closing: the engine has been started before.

        Example:
            >>> engine = af.Engine(af.load("runs/sort"))
            >>> engine.start()
            >>> import asyncio
            >>> asyncio.run(engine.close())
        """
        if self._thread is not None:
            raise Closing("an engine is started once: make another")
        self._open = self._drain = True
        self._thread = threading.Thread(target=self._run, name="anyformer-engine", daemon=True)
        self._thread.start()

    async def close(self, drain: bool = True) -> None:
        """Refuse new requests and end the thread.

        Args:
            drain: first finish all requests; else they end at once as cancelled.

        Example:
            >>> import asyncio
            >>> engine = af.Engine(af.load("runs/sort"))
            >>> asyncio.run(engine.close(drain=False))
        """
        with self._wake:
            self._open, self._drain = False, self._drain and drain
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(drain=kind is None)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, model: str | None = None) -> "Answer":
        """Queue a request for an answer, token by token. Closing the iterator cancels the request.

        Args:
            request: ids [1, t] of one prompt with its options.
            model: the name of a model or adapter; None: the only model.

        Returns:
            An asynchronous iterator of events: each `Token`, at last `Finished`.

        Raises:
            UnknownModel: no model has this name.
            Unsupported: the model cannot answer such a request.
            QueueFull: too many requests wait.
            Closing: the engine has not been started, or is closed.

        Example:
            >>> import asyncio
            >>> from anyformer.generation.api import Request
            >>> model = af.Transformer(af.presets.gpt2(depth=1, width=16, heads=2, vocab=11))
            >>> async def main():
            ...     async with af.Engine(model) as engine:
            ...         events = engine.submit(Request(torch.tensor([[1, 2]]), max_new_tokens=3))
            ...         return [type(event).__name__ async for event in events]
            >>> asyncio.run(main())
            ['Token', 'Token', 'Token', 'Finished']
        """
        return Answer(self._enqueue(request, model))

    async def complete(self, request: Request, model: str | None = None) -> WholeAnswer:
        """Return an answer at its end: faster than token by token.

        Args:
            request: as for `submit`.
            model: the name of a model or adapter; None: the only model.

        Returns:
            The `ids` of the answer, its `end`, and `tokens` with log-probabilities if the request has `top`.

        Raises:
            UnknownModel, Unsupported, QueueFull, Closing: as `submit`.

        Example:
            >>> import asyncio
            >>> from anyformer.generation.api import Request
            >>> model = af.Transformer(af.presets.gpt2(depth=1, width=16, heads=2, vocab=11))
            >>> async def main():
            ...     async with af.Engine(model) as engine:
            ...         return await engine.complete(Request(torch.tensor([[1, 2]]), max_new_tokens=3))
            >>> len(asyncio.run(main()).ids)
            3
        """
        sequence = self._enqueue(request, model, streams=False)
        try:
            *items, end = await _receive(sequence)
        finally:
            sequence.cancelled = True  # no effect once it has finished
        if isinstance(end, Exception):
            raise end
        assert isinstance(end, Finished)
        tokens = [item for item in items if isinstance(item, Token)]
        ids = [id for item in items for id in (item if isinstance(item, TokenIds) else (cast(Token, item).id,))]
        return WholeAnswer(ids, end, tokens if request.top is not None else [])

    async def search(self, request: Request, n_best: int = 1, model: str | None = None) -> list[BeamHypothesis]:
        """Return the hypotheses of a beam search, best first.

        Args:
            request: ids [1, t] with the strategy `Beam`.
            n_best: how many hypotheses to return, at most the beams.
            model: the name of a model or adapter; None: the only model.

        Returns:
            The `ids` of each hypothesis and its `score`; none if no answer meets the constraint.

        Raises:
            Unsupported: the strategy is another, or `n_best` is above its beams.
            Failed: the search was cancelled, or logits were not finite.

        Example:
            >>> import asyncio
            >>> from anyformer.generation.api import Beam, Request
            >>> model = af.Transformer(af.presets.gpt2(depth=1, width=16, heads=2, vocab=11))
            >>> async def main():
            ...     async with af.Engine(model) as engine:
            ...         request = Request(torch.tensor([[1, 2]]), max_new_tokens=3, strategy=Beam(beams=4))
            ...         return await engine.search(request, n_best=2)
            >>> len(asyncio.run(main()))
            2
        """
        if not isinstance(request.strategy, Beam):
            raise Unsupported("hypotheses are those of beam search: give beams")
        if not 1 <= n_best <= request.strategy.beams:
            raise Unsupported(f"n_best = {n_best}: must be from 1 to the number of beams, {request.strategy.beams}")
        penalty, name = request.strategy.length_penalty, self._find(model)
        paged = self._servers[name] is not self._serial[name]  # and has log-probabilities
        if paged and request.strategy == Beam(beams=1, length_penalty=penalty):
            return [await self._greedy(request, penalty, model)]
        sequence = self._enqueue(request, model)
        try:
            end = cast(Finished, (await _receive(sequence))[-1])
        finally:
            sequence.cancelled = True  # no effect once it has finished
        if not end.hypotheses and end.message != NOT_FOUND:
            raise Failed(end.message or "the search was cancelled")
        return list(end.hypotheses[:n_best])

    async def _greedy(self, request: Request, penalty: float, model: str | None) -> BeamHypothesis:
        """Return the hypothesis of a search with one beam: the greedy answer, which is decoded faster."""
        ids, end, tokens = await self.complete(replace(request, strategy=Sampling(), top=0), model)
        if end.reason in ("error", "cancelled"):
            raise Failed(end.message or "the search was cancelled")
        total = sum(token.logprob or 0.0 for token in tokens)
        return BeamHypothesis(tuple(ids), total / max(len(ids), 1) ** penalty)

    async def encode(self, kind: EncodeKind, texts: list[str], model: str | None = None, **options: Any) -> list[Any]:
        """Return one item per text: a vector, labels, tags, a score, fillings of masks, or a number.

        Args:
            kind: the computation, one of `engine.models[name].kinds`: "score", "embed", "classify" and others.
            texts: the texts, which share batches with those of other requests.
            model: the name of a model; None: the only one.
            options: those of the kind, such as `answers` of "score".

        Returns:
            The items, in the order of the texts.

        Raises:
            Unsupported: the model cannot compute this kind.
            QueueFull: too many requests wait.

        Example:
            >>> import asyncio
            >>> run = af.load("runs/sort")
            >>> async def main():
            ...     async with af.Engine(run) as engine:
            ...         right, wrong = await engine.encode("score", ["3 1 2"] * 2, answers=["1 2 3", "3 2 1"])
            ...         return right.total > wrong.total
            >>> asyncio.run(main())
            True
        """
        return (await self.encode_counted(kind, texts, model, **options))[0]

    async def encode_counted(
        self, kind: EncodeKind, texts: list[str], model: str | None = None, **options: Any
    ) -> tuple[list[Any], int]:
        """Do the same as `encode`, and count tokens.

        Args:
            kind: as for `encode`.
            texts: as for `encode`.
            model: as for `encode`.
            options: as for `encode`.

        Returns:
            The items, and how many tokens the model read; 0 for scores.

        Raises:
            Unsupported, QueueFull: as `encode`.

        Example:
            >>> import asyncio
            >>> run = af.load("runs/sort")
            >>> async def main():
            ...     async with af.Engine(run) as engine:
            ...         return await engine.encode_counted("score", [])
            >>> asyncio.run(main())
            ([], 0)
        """
        name, tokens = self._find(model), 0
        if kind not in self.models[name].kinds:
            able = ", ".join(self.models[name].kinds) or "nothing"
            raise Unsupported(f"{name} cannot {kind}; it can {able}")
        if not texts:
            return [], 0
        server, future = self._encoders[name], asyncio.get_running_loop().create_future()
        if server.waiting >= self.limits.queue:
            raise QueueFull(f"{server.waiting} requests wait already: try again later")
        if kind == "score":
            job: TextJob | ScoreJob = ScoreJob(lambda: server.run.score(texts, **options), future)
        else:
            examples, items = await asyncio.to_thread(server.prepare, kind, texts, **options)
            job, tokens = TextJob(examples, items, future), sum(example.length for example in examples)
        self._send(lambda: server.add(job))
        return await future, tokens

    def stats(self) -> dict[str, Stats]:
        """Return counters and gauges of each model.

        Returns:
            A copy of the `Stats` of each model, by its name: requests that run, tokens, times.

        Example:
            >>> engine = af.Engine(af.load("runs/sort"))
            >>> [stats.running for stats in engine.stats().values()]
            [0]
        """
        return {name: server.stats.copy() for name, server in self._servers.items()}

    def _find(self, model: str | None) -> str:
        if model is None and len(self.models) == 1:
            return next(iter(self.models))
        if model is None or model not in self.models:
            what = "several models are served: name one" if model is None else f"model {model!r} is not served"
            raise UnknownModel(f"{what}; known: {', '.join(self.models)}")
        return model

    def _enqueue(self, request: Request, model: str | None, streams: bool = True) -> Sequence:
        name = self._find(model)
        check_served(self.models[name], self._bodies[name], self.limits, request)
        steps = request.strategy.streams or isinstance(request.strategy, Beam)
        server, mailbox = (self._servers if steps else self._serial)[name], _mailbox()
        server.check(request)
        sequence = Sequence(request, mailbox, streams)
        self._send(lambda: server.add(sequence), server.stats)
        return sequence

    def _send(self, command: Callable[[], None], queue: Stats | None = None) -> None:
        """Let the engine's thread call a function, and count a request of a queue."""
        with self._wake:
            if not self._open:
                raise Closing("the engine is shutting down" if self._thread else "the engine has not been started")
            if queue is not None:
                if queue.waiting >= self.limits.queue:
                    raise QueueFull(f"{queue.waiting} requests wait already: try again later")
                queue.submitted += 1
            self._inbox.append(command)
            self._wake.notify()

    # -- the thread that runs the models ------------------------------------------------------------------------------

    def _run(self) -> None:
        servers = list(dict.fromkeys([*self._servers.values(), *self._serial.values()]))
        encoders = list(self._encoders.values())
        outboxes = [Outbox(server.stats) for server in servers]
        while True:
            with self._wake:
                busy = any(server.busy for server in servers) or any(encoder.busy for encoder in encoders)
                while not busy and not self._inbox and self._open:
                    self._wake.wait()
                commands, self._inbox = self._inbox, []
                if not self._drain or (not busy and not commands and not self._open):
                    break
            for command in commands:
                command()
            for encoder in encoders:
                if encoder.busy:
                    encoder.step()
            for server, out in zip(servers, outboxes, strict=True):
                if server.busy:
                    try:
                        server.step(out)
                    except Exception as error:
                        log.exception("a step failed; its requests end with an error")
                        server.fail(out, f"internal error: {type(error).__name__}")
                    out.flush()
        for server, out in zip(servers, outboxes, strict=True):
            server.fail(out, "the engine was shut down")
            out.flush()
        for encoder in encoders:
            encoder.fail("the engine was shut down")


class Answer:
    """The events of one request, as an async iterator; closing it cancels the request."""

    def __init__(self, sequence: Sequence):
        self._sequence, self._over = sequence, False
        self._items: list[Event | Exception] = []  # delivered, the next one last

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        if not self._items:
            try:
                self._items = _events(await _receive(self._sequence))[::-1]
            except asyncio.CancelledError:
                await self.aclose()
                raise
        item = self._items.pop()
        if isinstance(item, Exception):
            raise item
        self._over = isinstance(item, Finished)
        return item

    async def aclose(self) -> None:
        """Cancel the request, unless it has finished."""
        self._over = self._sequence.cancelled = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _events(items: list[Item]) -> list[Event | Exception]:
    """Return tokens one by one."""
    found: list[Event | Exception] = []
    for item in items:
        if isinstance(item, TokenIds):
            found.extend(map(Token, item))
        else:
            found.append(item)
    return found


async def _receive(sequence: Sequence) -> list[Item]:
    """Return the next events of a mailbox, at least one."""
    assert sequence.mailbox is not None
    return await sequence.mailbox[1].get()


def _mailbox() -> Mailbox:
    return asyncio.get_running_loop(), asyncio.Queue()


def _name(run: Run | Transformer) -> str:
    return run.folder.name if isinstance(run, Run) else "model"


def _model(run: Run | Transformer) -> Transformer:
    return run.model if isinstance(run, Run) else run


def _is_marked(run: Run | Transformer) -> bool:
    return isinstance(run, Run) and bool(getattr(run.task, "marked", False))


def _describe(name: str, run: Run | Transformer, adapters: tuple[str, ...], limits: Limits) -> Model:
    model, own = _model(run), run if isinstance(run, Run) else None
    length, source = longest_text(model, limits), limits_of(model)[1]
    writes = model.config.generates
    vocabulary = model.config.vocab if writes else None
    tokenizer = None if own is None else own.tokenizer
    kinds: tuple[str, ...] = ("generate", "search") if writes else ()
    if own is not None:
        served = own.spec.serves(own.config.head)
        kinds += ((served,) if served else ()) + (("score",) if writes else ())
    return Model(name, own, tokenizer, length, source, vocabulary, kinds, adapters)
