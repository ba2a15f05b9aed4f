"""Answers as text: pieces with their tokens, from the events of the engine."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from anyformer.generation.engine.engine import Answer
from anyformer.generation.engine.interface import Event, Finished, Token
from anyformer.generation.http.errors import ApiError
from anyformer.generation.http.service import ServedRun, Service
from anyformer.generation.request import Request
from anyformer.tasks.text_stream import IncrementalDecoder, StopStrings

NO_RESULT = {"error": 500, "cancelled": 503}  # status of a response without an answer


class Spelled(NamedTuple):
    """A token, and where its text begins."""

    token: Token
    offset: int


class Piece(NamedTuple):
    """New text of a choice, with the tokens that begin in it; `finished` with the last piece."""

    choice: int
    text: str
    tokens: tuple[Spelled, ...]
    finished: str | None = None  # "stop" or "length"


class GrowingAnswer:
    """One answer that grows: its text up to a stop string, and its tokens."""

    def __init__(self, run: ServedRun, request: Request, stop: Sequence[str], *, alone: bool, echo: bool = False):
        """The text of an answer that is `alone` begins without the space that some tokenizers write."""
        self.run, self.request, self.ids = run, request, request.ids[0].tolist()
        before = [] if alone else self.ids
        self._decoder, self._stops = IncrementalDecoder(run.tokenizer, before), StopStrings(stop)
        self.echoed = run.tokenizer.decode(self.ids) if echo else ""
        self._offset = self._released = len(self.echoed)
        self._pending: list[Spelled] = []
        self.tokens = 0
        self.end: Finished | None = None

    @property
    def stopped(self) -> bool:
        """True after a stop string has ended the text."""
        return self._stops.found

    def push(self, token: Token) -> tuple[str, tuple[Spelled, ...]]:
        """Add a token; return the text that became certain, and its tokens."""
        if self.stopped:
            return "", ()
        self.tokens += 1
        if token.id in self.request.stop_ids:
            return "", ()
        text = self._decoder.push([token.id])
        self._pending.append(Spelled(token, self._offset))
        self._offset += len(text)
        text = self._stops.push(text)
        return text, self._release(text)

    def finish(self) -> tuple[str, tuple[Spelled, ...]]:
        """Return the text and tokens that were held back."""
        text = "" if self.stopped else self._stops.push(self._decoder.rest()) + self._stops.rest()
        tokens = self._release(text)
        return text, tokens if self.stopped else (*tokens, *self._pending)

    def _release(self, text: str) -> tuple[Spelled, ...]:
        self._released += len(text)
        ready = [one for one in self._pending if one.offset < self._released]
        self._pending = self._pending[len(ready) :]
        return tuple(ready)

    def prompt_tokens(self) -> tuple[Spelled, ...]:
        """Return the tokens of the prompt with their log-probabilities, after the end."""
        ids, known = self.ids, self.end.prompt_logprobs if self.end else ()
        decoder, offset, spelled = IncrementalDecoder(self.run.tokenizer), 0, []
        for token in (Token(ids[0]), *known):
            spelled.append(Spelled(token, offset))
            offset += len(decoder.push([token.id]))
        return tuple(spelled)


class AnswerGroup:
    """The answers to one request. Entering it queues them; leaving it cancels those that have not finished."""

    def __init__(self, service: Service, choices: Sequence[GrowingAnswer]):
        self._service, self.choices = service, choices
        self._stack = AsyncExitStack()
        self._events: list[Answer] = []

    async def __aenter__(self) -> "AnswerGroup":
        async with AsyncExitStack() as stack:
            for choice in self.choices:
                answer = self._service.engine.submit(choice.request, choice.run.model.name)
                stack.push_async_callback(answer.aclose)
                self._events.append(answer)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the text of all choices as it comes. Raise an `ApiError` where the engine fails."""
        left = len(self.choices)
        async for i, event in self._merged():
            choice = self.choices[i]
            if choice.end is not None:
                continue
            if isinstance(event, Token):
                text, tokens = choice.push(event)
                if choice.stopped and not choice.request.prompt_logprobs:
                    await self._events[i].aclose()
                    event = Finished("stop", len(choice.ids))
                elif text or tokens:
                    yield Piece(i, text, tokens)
                    continue
                else:
                    continue
                yield Piece(i, text, tokens)
            choice.end = event
            if event.reason in NO_RESULT:
                raise ApiError(NO_RESULT[event.reason], event.message or "the answer was cancelled")
            text, tokens = choice.finish()
            yield Piece(i, text, tokens, "stop" if choice.stopped else event.reason)
            left -= 1
            if not left:
                return

    async def _merged(self) -> AsyncGenerator[tuple[int, Event], None]:
        if len(self._events) == 1:
            async for event in self._events[0]:
                yield 0, event
            return
        queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        tasks = [asyncio.create_task(_forward(i, answer, queue)) for i, answer in enumerate(self._events)]
        try:
            while True:
                i, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield i, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(i: int, answer: Answer, queue: "asyncio.Queue[tuple[int, Event | Exception]]") -> None:
    try:
        async for event in answer:
            queue.put_nowait((i, event))
    except Exception as error:
        queue.put_nowait((i, error))
