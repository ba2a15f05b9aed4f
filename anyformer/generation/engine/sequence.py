"""A request that is being answered: its receiver, its tokens, its pages, and how far it was read."""

import asyncio
import time
from collections.abc import Iterator, Sequence as List
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.generation.engine.interface import (
    NOT_FINITE,
    NOT_FOUND,
    BeamHypothesis,
    Event,
    Finished,
    Reason,
    Token,
)
from anyformer.generation.engine.pages import chain
from anyformer.generation.generate import seeds_of
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam, Sampling

if TYPE_CHECKING:
    from anyformer.generation.engine.beams import Beams


def on_device(values: Any, device: torch.device) -> Tensor:
    """Return integers as a tensor, copied to a device without waiting for it."""
    x = torch.from_numpy(np.asarray(values, dtype=np.int64))
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


class Options(NamedTuple):
    """Options that requests share if they are processed together."""

    sampling: Sampling
    stop: tuple[int, ...]
    constrained: bool


@lru_cache(maxsize=256)
def _one(options: Options) -> Options:
    """Return the same object for equal options: to compare objects takes no time."""
    return options


class TokenIds(list[int]):
    """Tokens without log-probabilities: one object of Python for many of them."""


Item = Event | TokenIds | Exception
Mailbox = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[list[Item]]"]


class Sequence:
    """One request. It has one row, or one per beam, all with the same number of tokens in the cache.

    Without `streams`, all events are delivered at the end. Without a mailbox, an outbox collects them itself.
    """

    def __init__(self, request: Request, mailbox: Mailbox | None = None, streams: bool = True):
        self.request, self.mailbox, self.streams = request, mailbox, streams
        self.events: list[Item] = []  # not delivered yet
        self.arrived, self.newest = time.perf_counter(), 0.0
        self.started = self.cancelled = False  # a cancelled one is dropped at the next step
        self.cached = 0  # tokens of the prompt that earlier requests had read
        self.prompt_scores: list[Token] = []

    def begin(self, start: int | None, device: torch.device) -> None:
        """Enter the queue of a paged server. `start`: what the decoder of a model with an encoder reads first."""
        request, strategy, pair = self.request, self.request.strategy, start is not None
        given, constraint = tuple(request.ids[0].tolist()), request.constraint
        self.source: tuple[int, ...] = given if pair else ()
        self.prompt: tuple[int, ...] = given if start is None else (start,)  # as the decoder reads it
        self.answer: list[int] = []
        self.budget = request.longest
        plain = constraint is None and request.top is None and self.left > 0
        # whether a step may be run before the newest token is known
        self.can_wait = plain and strategy.streams and not strategy.reads_tokens
        self.tables: list[list[int]] = []  # pages of each row
        self.source_pages: list[int] = []
        self.read = 0  # tokens of each row in the cache
        self.has_source = not pair  # whether the cache holds the source
        self.beams: Beams | None = None
        self.rows = strategy.beams if isinstance(strategy, Beam) else 1  # that it takes while it decodes
        self.seed = 0
        self.options: Options | None = None  # None in a beam search
        if isinstance(strategy, Sampling):
            self.options = _one(Options(strategy, request.stop_ids, constraint is not None))
            if strategy.temperature:
                self.seed = int(seeds_of(request.seed, 1, torch.device("cpu")))
        self.state = None if constraint is None else torch.tensor([constraint.start()], device=device)

    @property
    def ids(self) -> list[int]:
        """The input of the decoder: the prompt and the answer so far."""
        return [*self.prompt, *self.answer]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def left(self) -> int:
        """Tokens of the budget that are left."""
        return self.budget - len(self.answer)

    def keys(self, size: int) -> Iterator[bytes]:
        """Yield the hashes of its full pages."""
        return chain(self.ids, size, self.request.adapter or "")

    def next_size(self, chunk: int) -> int:
        """Return how many tokens of the prompt, or of the source, the next prefill call reads."""
        return max(min(chunk, self.length - self.read), 0 if self.has_source else len(self.source))

    def part(self, chunk: int) -> list[int]:
        """Return the tokens that the next prefill call reads."""
        return self.ids[self.read : self.read + chunk]

    def end_search(self, found: List[BeamHypothesis] | None) -> Finished:
        """Return the end of a beam search with these hypotheses; None: logits were not finite."""
        if not found:
            return self.end("error", NOT_FINITE if found is None else NOT_FOUND)
        reason: Reason = "stop" if found[0].ids[-1] in self.request.stop_ids else "length"
        return self.end(reason)._replace(hypotheses=tuple(found))

    def end(self, reason: Reason, message: str = "") -> Finished:
        return Finished(reason, self.request.ids.shape[1], self.cached, tuple(self.prompt_scores), message)
