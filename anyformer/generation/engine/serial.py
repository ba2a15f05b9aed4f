"""Requests one after the other, for models whose state is not paged: recurrent layers, prompts that see themselves."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch

from anyformer.attention.cache.kv_cache import CacheKind
from anyformer.generation.beam_search import NonFiniteSearch, run_beam_search
from anyformer.generation.engine.admission import as_request
from anyformer.generation.engine.beams import hypotheses
from anyformer.generation.engine.job import Job, Outbox
from anyformer.generation.engine.request import Finished, Generation, Hypothesis, Token, Unsupported
from anyformer.generation.engine.stats import Stats
from anyformer.generation.generate import Picked, stream_sampling
from anyformer.generation.strategy import Beam
from anyformer.kernels.conventions import SEEN
from anyformer.nn.model import Transformer

NOT_FINITE = "the model's logits are not finite"


class SerialServer:
    """Answers requests by `decoding`, the oldest first."""

    def __init__(self, model: Transformer, marked: bool, cache: CacheKind):
        self.model, self.marked, self.cache, self.stats = model, marked, cache, Stats()
        self._jobs: deque[Job] = deque()
        self._tokens: Iterator[Picked] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def check(self, generation: Generation) -> None:
        if generation.top is not None or generation.prompt_logprobs:
            raise Unsupported("log-probabilities are for models whose state is paged: this one has other layers")

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def step(self, out: Outbox) -> None:
        job = self._jobs[0]
        out.start(job)
        end = Finished("cancelled", len(job.generation.ids)) if job.cancelled else self._advance(job, out)
        if end is not None:
            found = end if isinstance(end, list) else None
            out.finish(job, Finished("stop", len(job.generation.ids)) if isinstance(end, list) else end, found)
            self._jobs.popleft()
            self._tokens = None

    def fail(self, out: Outbox, message: str) -> None:
        for job in self._jobs:
            out.finish(job, Finished("error", len(job.generation.ids), message=message))
        self._jobs.clear()
        self._tokens = None

    def _advance(self, job: Job, out: Outbox) -> Finished | list[Hypothesis] | None:
        """Return the end of a job, if this step has reached it."""
        generation, strategy, prompt = job.generation, job.generation.strategy, len(job.generation.ids)
        request = as_request(generation, next(self.model.parameters()).device)
        request = replace(request, cache=self.cache)
        if self.marked:
            request = replace(request, marks=torch.full_like(request.ids, SEEN))
        if isinstance(strategy, Beam):
            try:
                return hypotheses(run_beam_search(self.model, request, strategy))
            except NonFiniteSearch:
                return Finished("error", prompt, message=NOT_FINITE)
        if self._tokens is None:
            self._tokens = stream_sampling(self.model, request, strategy)
        picked = next(self._tokens, None)
        if picked is None:
            return Finished("length", prompt)
        if not bool(picked[1]):
            return Finished("error", prompt, message=NOT_FINITE)
        out.token(job, Token(int(picked[0])))
        return Finished("stop", prompt) if int(picked[0]) in generation.stop else None
