"""Delivery of the events of requests to the event loops that wait for them."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

from anyformer.generation.engine.interface import Finished, Token
from anyformer.generation.engine.sequence import Item, Sequence, TokenIds
from anyformer.generation.engine.stats import Stats
from anyformer.generation.request import Request

PATIENCE = 0.02  # seconds between two deliveries of tokens


class Outbox:
    """Collects events and hands them over to the event loops that wait for them.

    First tokens and ends are handed over after their step, other tokens every `PATIENCE` seconds: to wake a waiting
    task for each token of hundreds of requests would take more time than a step.
    """

    def __init__(self, stats: Stats):
        self.stats = stats
        self._waiting: set[Sequence] = set()  # with events to deliver
        self._urgent: set[Sequence] = set()
        self._due = self._newest = 0.0  # when other tokens are due, and when the newest one came

    def start(self, sequence: Sequence) -> None:
        """Count a request that leaves the queue for the first time."""
        if not sequence.started:
            sequence.started = True
            self.stats.started += 1
            self.stats.running += 1
            self.stats.queue_time.add(time.perf_counter() - sequence.arrived)

    def token(self, sequence: Sequence, token: Token) -> None:
        now = time.perf_counter()
        if sequence.newest:
            self.stats.token_time.add(now - sequence.newest)
        else:
            self.stats.first_token_time.add(now - sequence.arrived)
            if sequence.streams:
                self._urgent.add(sequence)
        sequence.newest = self._newest = now
        self.stats.generated_tokens += 1
        sequence.events.append(token)
        if sequence.streams:
            self._waiting.add(sequence)

    def count_step(self, tokens: int) -> None:
        """Count tokens of one step, whose answers all had a token in the step before; `tokens` adds them later."""
        now = time.perf_counter()
        self.stats.token_time.add(now - self._newest, tokens)
        self.stats.generated_tokens += tokens
        self._newest = now

    def tokens(self, sequence: Sequence, ids: list[int]) -> None:
        """Add tokens of several steps, which `count_step` has counted."""
        sequence.newest = self._newest
        sequence.events.append(TokenIds(ids))
        if sequence.streams:
            self._waiting.add(sequence)

    def is_due(self) -> bool:
        """Return whether tokens are handed over that are neither first nor last."""
        return time.perf_counter() >= self._due

    def finish(self, sequence: Sequence, end: Finished) -> None:
        """End a request; the answer of a search is the best of its hypotheses."""
        self.start(sequence)
        stats = self.stats
        stats.running -= 1
        stats.finished[end.reason] += 1
        stats.prompt_tokens += end.prompt_tokens
        stats.cached_tokens += end.cached_tokens
        stats.request_time.add(time.perf_counter() - sequence.arrived)
        sequence.events += [*(TokenIds(best.ids) for best in end.hypotheses[:1]), end]
        self._urgent.add(sequence)

    def flush(self) -> None:
        """Hand over all that is due, at the end of a step."""
        loops: defaultdict[asyncio.AbstractEventLoop, list[Delivery]] = defaultdict(list)
        for sequence, items in self.take():
            assert sequence.mailbox is not None
            loop, queue = sequence.mailbox
            loops[loop].append((queue, items))
        for loop, each in loops.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, each)

    def take(self) -> Iterator[tuple[Sequence, list[Item]]]:
        """Yield the events that are due, by request."""
        due = self._urgent
        if self.is_due():
            due, self._due = due | self._waiting, time.perf_counter() + PATIENCE
        self._waiting, self._urgent = self._waiting - due, set()
        for sequence in due:
            items, sequence.events = sequence.events, []
            yield sequence, items


Delivery = tuple["asyncio.Queue[list[Item]]", list[Item]]


def _deliver(each: list[Delivery]) -> None:
    for queue, items in each:
        queue.put_nowait(items)


class Server(Protocol):
    """The part of the engine that answers the generation requests of one model, in the engine's thread."""

    stats: Stats

    @property
    def busy(self) -> bool:
        """True if a step has something to do."""

    def check(self, request: Request) -> None:
        """Raise the error of a request that it cannot answer; called by the thread of the caller."""

    def add(self, sequence: Sequence) -> None: ...

    def step(self, out: Outbox) -> None:
        """Advance the requests by about one token each, and drop those that were cancelled."""

    def fail(self, out: Outbox, message: str) -> None:
        """End all requests after an exception."""
