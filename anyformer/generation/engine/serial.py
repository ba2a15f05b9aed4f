"""Requests one after the other: those of models whose state is not paged, and of strategies that find whole answers.

State is not paged where layers are recurrent, or prompts see all of themselves.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from anyformer.attention.cache.kv_cache import CacheKind
from anyformer.config import ConfigError
from anyformer.generation.beam_search import NonFiniteSearch, search_steps
from anyformer.generation.engine.beams import hypotheses
from anyformer.generation.engine.interface import NOT_FINITE, Finished, Token, Unsupported
from anyformer.generation.engine.outbox import Outbox
from anyformer.generation.engine.sequence import Sequence
from anyformer.generation.engine.stats import Stats
from anyformer.generation.generate import Picked, chunks
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam
from anyformer.kernels.conventions import SEEN
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.model import Transformer


class SerialServer:
    """Answers the requests of one model, and of the same model with adapters by name, the oldest first."""

    def __init__(self, body: Transformer, marked: bool, cache: CacheKind, adapters: Mapping[str, Transformer]):
        self.models: dict[str | None, Transformer] = {None: body}
        self.models.update(adapters)
        self.marked, self.cache, self.stats = marked, cache, Stats()
        self._waiting: deque[Sequence] = deque()
        self._steps: Iterator[Picked | None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def check(self, request: Request) -> None:
        if request.top is not None or request.prompt_logprobs:
            raise Unsupported("log-probabilities are for models whose state is paged: this one has other layers")

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def step(self, out: Outbox) -> None:
        sequence = self._waiting[0]
        out.start(sequence)
        try:
            end = sequence.end("cancelled") if sequence.cancelled else self._advance(sequence, out)
        except ConfigError as error:  # options that do not fit this model
            end = sequence.end("error", str(error))
        if end is not None:
            out.finish(sequence, end)
            self._waiting.popleft()
            self._steps = None

    def fail(self, out: Outbox, message: str) -> None:
        for sequence in self._waiting:
            out.finish(sequence, sequence.end("error", message))
        self._waiting.clear()
        self._steps = None

    def _advance(self, sequence: Sequence, out: Outbox) -> Finished | None:
        """Return the end of a request, if this step has reached it."""
        model = self.models[sequence.request.adapter]
        if self._steps is None:
            ids = sequence.request.ids.to(next(model.parameters()).device)
            marks = torch.full_like(ids, SEEN) if self.marked else None
            request = replace(sequence.request, ids=ids, cache=self.cache, marks=marks, adapter=None)
            search = isinstance(request.strategy, Beam)
            self._steps = search_steps(model, request) if search else chunks(model, request, 1)
        try:
            with evaluating(model):
                new = next(self._steps) or ()
        except NonFiniteSearch:
            return sequence.end_search(None)
        except StopIteration as end:
            return sequence.end("length") if end.value is None else sequence.end_search(hypotheses(end.value))
        for id, ok in zip(*(x[0].tolist() for x in new), strict=True):
            if not ok:
                return sequence.end("error", NOT_FINITE)
            out.token(sequence, Token(id))
            if id in sequence.request.stop_ids:
                return sequence.end("stop")
        return None
