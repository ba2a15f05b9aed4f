"""Counters, gauges and histograms of one served model."""

from bisect import bisect_left
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


@dataclass
class Histogram:
    """Counts of observed seconds by upper bound; the last count is of those above all bounds."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += times * seconds


@dataclass
class Stats:
    """State of one model. All times are in seconds."""

    running: int = 0  # requests that are being answered
    submitted: int = 0  # requests, counted by their callers
    started: int = 0  # requests that have left the queue
    pages: int = 0  # of the KV cache
    pages_used: int = 0  # by running requests; pages that are kept for reuse are free
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, read by earlier requests
    generated_tokens: int = 0
    encoded_texts: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # requests, by reason
    queue_time: Histogram = field(default_factory=Histogram)
    first_token_time: Histogram = field(default_factory=Histogram)
    token_time: Histogram = field(default_factory=Histogram)  # between two tokens of an answer
    request_time: Histogram = field(default_factory=Histogram)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self.submitted - self.started

    def copy(self) -> "Stats":
        """Return a copy, while the engine's thread may be counting."""
        while True:
            try:
                return deepcopy(self)
            except RuntimeError:  # a reason to finish was added meanwhile
                continue
