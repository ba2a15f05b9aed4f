"""A request inside the engine, and the delivery of its events to the event loops that wait for them."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from anyformer.generation.engine.request import Event, Finished, Generation, Hypothesis, Token
from anyformer.generation.engine.stats import Stats


class TokenIds(list[int]):
    """Tokens without log-probabilities: one object of Python for many of them."""


Item = Event | TokenIds | list[Hypothesis] | Exception
Mailbox = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[list[Item]]"]
PATIENCE = 0.02  # seconds between two deliveries of tokens


class Job:
    """A generation request with its mailbox and times.

    Without `streams`, all events are delivered at the end. A job without a mailbox is for an outbox that collects the
    events itself.
    """

    def __init__(self, generation: Generation, mailbox: Mailbox | None = None, streams: bool = True):
        self.generation, self.mailbox, self.streams = generation, mailbox, streams
        self.events: list[Item] = []  # not delivered yet
        self.arrived, self.newest = time.perf_counter(), 0.0
        self.started = self.cancelled = False  # a cancelled job is dropped at the next step

    async def receive(self) -> list[Item]:
        """Return the next events of the mailbox, at least one."""
        assert self.mailbox is not None
        return await self.mailbox[1].get()


class Outbox:
    """Collects events and hands them over to the event loops that wait for them.

    First tokens and ends are handed over after their step, other tokens every `PATIENCE` seconds: to wake a waiting
    task for each token of hundreds of requests would take more time than a step.
    """

    def __init__(self, stats: Stats):
        self.stats = stats
        self._waiting: set[Job] = set()  # jobs with events to deliver
        self._urgent: set[Job] = set()
        self._due = self._newest = 0.0  # when other tokens are due, and when the newest one came

    def start(self, job: Job) -> None:
        """Count a job that leaves the queue for the first time."""
        if not job.started:
            job.started = True
            self.stats.started += 1
            self.stats.running += 1
            self.stats.queue_time.add(time.perf_counter() - job.arrived)

    def token(self, job: Job, token: Token) -> None:
        now = time.perf_counter()
        if job.newest:
            self.stats.token_time.add(now - job.newest)
        else:
            self.stats.first_token_time.add(now - job.arrived)
            if job.streams:
                self._urgent.add(job)
        job.newest = self._newest = now
        self.stats.generated_tokens += 1
        job.events.append(token)
        if job.streams:
            self._waiting.add(job)

    def count_step(self, tokens: int) -> None:
        """Count tokens of one step, whose answers all had a token in the step before; `tokens` adds them later."""
        now = time.perf_counter()
        self.stats.token_time.add(now - self._newest, tokens)
        self.stats.generated_tokens += tokens
        self._newest = now

    def tokens(self, job: Job, ids: list[int]) -> None:
        """Add tokens of several steps, which `count_step` has counted."""
        job.newest = self._newest
        job.events.append(TokenIds(ids))
        if job.streams:
            self._waiting.add(job)

    def is_due(self) -> bool:
        """Return whether `flush` hands over tokens that are neither first nor last."""
        return time.perf_counter() >= self._due

    def finish(self, job: Job, end: Finished, found: Sequence[Hypothesis] | None = None) -> None:
        """End a job; `found` are the hypotheses of a search."""
        self.start(job)
        stats = self.stats
        stats.running -= 1
        stats.finished[end.reason] += 1
        stats.prompt_tokens += end.prompt_tokens
        stats.cached_tokens += end.cached_tokens
        stats.request_time.add(time.perf_counter() - job.arrived)
        job.events.append(end if found is None else list(found))
        self._urgent.add(job)

    def flush(self) -> None:
        """Hand over all that is due, at the end of a step."""
        now = time.perf_counter()
        due = self._urgent
        if now >= self._due:
            due, self._due = due | self._waiting, now + PATIENCE
        self._waiting, self._urgent = self._waiting - due, set()
        loops: defaultdict[asyncio.AbstractEventLoop, list[Delivery]] = defaultdict(list)
        for job in due:
            assert job.mailbox is not None
            loop, queue = job.mailbox
            loops[loop].append((queue, job.events))
            job.events = []
        for loop, each in loops.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, each)


Delivery = tuple["asyncio.Queue[list[Item]]", list[Item]]


def _deliver(each: list[Delivery]) -> None:
    for queue, items in each:
        queue.put_nowait(items)


class Server(Protocol):
    """The part of the engine that answers the generation requests of one model, in the engine's thread."""

    stats: Stats

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""

    def check(self, generation: Generation) -> None:
        """Raise the error of a request that it cannot answer; called by the thread of the caller."""

    def add(self, job: Job) -> None: ...

    def step(self, out: Outbox) -> None:
        """Advance the requests by about one token each, and drop those that were cancelled."""

    def fail(self, out: Outbox, message: str) -> None:
        """End all requests after an exception."""
