"""Continuous batching of many texts in the caller's thread, without a queue of requests."""

from collections.abc import Iterator, Sequence as List

import torch

from anyformer.generation.engine.interface import NOT_FINITE, Finished, Limits, Token, TooLong
from anyformer.generation.engine.outbox import Outbox
from anyformer.generation.engine.paged_server import PagedServer
from anyformer.generation.engine.sequence import Item, Sequence, TokenIds
from anyformer.generation.engine.sequence_pages import is_paged
from anyformer.generation.engine.stats import Stats
from anyformer.generation.strategy import Sampling
from anyformer.nn.model import Transformer
from anyformer.tasks.base import media_of
from anyformer.tasks.generation import FinishedAnswer, GenerationRequest
from anyformer.tasks.text_stream import NONFINITE, AnswerText

CPU_PAGES = 1024  # of 16 tokens
PREFILL_TOKENS = 8192


class OfflineEngine:
    """Answers the texts of a generation request by continuous batching: a `SamplingBackend`.

    It begins each request in the same state, and no clock decides. So the batches, and with them the last bits of
    logits, depend on the texts alone: the same texts have the same answers in any process.
    """

    def __init__(self, model: Transformer, limits: Limits | None = None):
        pages = None if next(model.parameters()).is_cuda else CPU_PAGES
        self.model, self.limits = model, limits or Limits(pages=pages, prefill_tokens=PREFILL_TOKENS)
        self._server: PagedServer | None = None

    def decode(self, request: GenerationRequest) -> Iterator[list[FinishedAnswer]]:
        """Yield answers as they finish; for requests that pages do not support, by the batches of `request`."""
        sequences = self._sequences(request) if self._supports(request) else None
        if sequences is None:
            yield from request.decoded()
            return
        assert self._server is not None
        answers = {one: FinishedAnswer(i, request.answer_text(i)) for i, one in sequences.items()}
        out = _Outbox(at_once=bool(request.stop))
        try:
            for sequence in sequences.values():
                self._server.add(sequence)
            while self._server.busy:
                self._server.step(out)
                if finished := [answers[one] for one, items in out.take() if _push(one, items, answers[one].text)]:
                    yield sorted(finished)
        finally:  # of an error, or of a caller that stops early
            if self._server.busy:
                self._server = None

    def _supports(self, request: GenerationRequest) -> bool:
        task = request.task
        plain = type(request.strategy) is Sampling and not request.settings and not request.constraints.phrases
        return plain and not task.marked and media_of(task) is None and is_paged(self.model)

    def _sequences(self, request: GenerationRequest) -> dict[int, Sequence] | None:
        """Return a sequence for each text that has a prompt, the longest first; None if one needs too many pages."""
        server = self._server = self._server or PagedServer(self.model, self.limits, {})
        server.pages.forget()  # beginnings of earlier texts
        sequences: dict[int, Sequence] = {}
        for i in sorted(range(len(request.prompts)), key=lambda i: -len(request.prompts[i])):
            if not request.prompts[i]:
                continue
            sequences[i] = Sequence(request.request([i], torch.device("cpu")))
            try:
                server.check(sequences[i].request)
            except TooLong:
                return None
        return sequences


def _push(sequence: Sequence, items: List[Item], text: AnswerText) -> bool:
    """Add events to the text of an answer, which a stop string may end; return whether it has finished."""
    for item in items:
        match item:
            case Token(id=id):
                text.push([id])
            case TokenIds():
                text.push(item)
            case Finished(message=message) if message == NOT_FINITE:
                text.push([NONFINITE])
    sequence.cancelled = text.ended
    return isinstance(items[-1], Finished)


class _Outbox(Outbox):
    """Events for the caller of a step: stop strings need all tokens at once, other texts those of ended answers."""

    def __init__(self, at_once: bool):
        super().__init__(Stats())
        self._at_once = at_once

    def is_due(self) -> bool:
        return self._at_once
