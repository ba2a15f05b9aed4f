"""The state of a request that is being answered: its tokens, its pages, and how far it was read."""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.generation.engine.job import Job
from anyformer.generation.engine.pages import chain
from anyformer.generation.engine.readback import can_wait
from anyformer.generation.engine.request import Finished, Reason, Token
from anyformer.generation.generate import seeds_of
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


class Sequence:
    """One request. It has one row, or one per beam, all with the same number of tokens in the cache."""

    def __init__(self, job: Job, start: int | None, device: torch.device):
        generation = job.generation
        self.job, self.generation = job, generation
        pair = start is not None
        self.source: tuple[int, ...] = generation.ids if pair else ()
        self.prompt: tuple[int, ...] = (start,) if start is not None else generation.ids  # as the decoder reads it
        self.answer: list[int] = []
        self.can_wait = can_wait(generation)  # whether a step may be run before the newest token is known
        self.tables: list[list[int]] = []  # pages of each row
        self.source_pages: list[int] = []
        self.read = 0  # tokens of each row in the cache
        self.has_source = not pair  # whether the cache holds the source
        self.cached = 0  # tokens of the prompt that earlier requests had read
        self.prompt_scores: list[Token] = []
        self.beams: Beams | None = None
        strategy = generation.strategy
        self.rows = strategy.beams if isinstance(strategy, Beam) else 1  # that it takes while it decodes
        self.seed = 0
        self.options: Options | None = None  # None in a beam search
        if not isinstance(strategy, Beam):
            self.options = _one(Options(strategy, generation.stop, generation.constraint is not None))
            if strategy.temperature:
                self.seed = int(seeds_of(generation.seed, 1, torch.device("cpu")))
        constraint = generation.constraint
        self.state = None if constraint is None else torch.tensor([constraint.start()], device=device)

    @property
    def ids(self) -> list[int]:
        """What the decoder reads: the prompt and the answer so far."""
        return [*self.prompt, *self.answer]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def left(self) -> int:
        """Tokens of the budget that are left."""
        return self.generation.max_new_tokens - len(self.answer)

    def keys(self, size: int) -> Iterator[bytes]:
        """Yield the hashes of its full pages."""
        return chain(self.ids, size, self.generation.adapter or "")

    def next_size(self, chunk: int) -> int:
        """Return how many tokens of the prompt, or of the source, the next prefill call reads."""
        return max(min(chunk, self.length - self.read), 0 if self.has_source else len(self.source))

    def part(self, chunk: int) -> list[int]:
        """Return the tokens that the next prefill call reads."""
        return self.ids[self.read : self.read + chunk]

    def end(self, reason: Reason, message: str = "") -> Finished:
        return Finished(reason, len(self.generation.ids), self.cached, tuple(self.prompt_scores), message)
