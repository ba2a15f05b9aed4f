"""Continuous batching over a paged KV cache: requests join and leave at every step.

A step reads one batch of prompts (prefill), at most `prefill_tokens` in chunks of at most `chunk`, and one more token
of every running request. Where pages run out, the newest request gives its pages back and is read again later.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence as List
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from anyformer.generation.engine.beams import Beams
from anyformer.generation.engine.decode_batch import DecodeBatch, Readback, UnreadStep
from anyformer.generation.engine.interface import NOT_FINITE, Limits, Reason, Token, TooLong
from anyformer.generation.engine.outbox import Outbox
from anyformer.generation.engine.pages import count_pages_for
from anyformer.generation.engine.rows import Row, StepRows
from anyformer.generation.engine.runner import Runner
from anyformer.generation.engine.sampler import choose, score
from anyformer.generation.engine.sequence import Sequence, on_device
from anyformer.generation.engine.sequence_pages import SequencePages
from anyformer.generation.engine.stats import Stats
from anyformer.generation.request import Request
from anyformer.generation.step import logits as logits_of
from anyformer.generation.strategy import Beam
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.substitute import substitute

DEAD_END = "the constraint is too ambiguous: no complete answer was found"
REPRODUCIBLE_TOKENS = 4096  # of prompt and answer in a reproducible engine that sets no such limits
SCORED_ROWS = 64  # prompt tokens whose logits are in memory at once


class PagedServer:
    """Answers the requests of one model, and of the same model with adapters by name."""

    def __init__(self, body: Transformer, limits: Limits, adapters: Mapping[str, Transformer]):
        assert body.decoder is not None
        self.models: dict[str | None, Transformer] = {None: body}
        self.models.update(adapters)
        for model in self.models.values():
            substitute(model)
        self.limits, self.stats = limits, Stats()
        self.device = next(body.parameters()).device
        self.start = body.config.special.start if body.encoder is not None else None
        self.pages = SequencePages(body, limits)
        self.longest = _longest(body, limits, self.pages.own.total * limits.page_size)
        widest = [self.longest[0] // limits.page_size + 1, count_pages_for(self.longest[1], limits.page_size)]
        self.runner = Runner(self.pages.pool, limits, self.device, (widest[0], max(widest[1], 1)))
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: dict[Sequence, None] = {}  # in order of their first tokens
        self.stats.pages = self.pages.own.total
        self.overlaps = self.device.type == "cuda"  # whether tokens are read one step late
        self._batch = DecodeBatch()  # running requests that decode a step ahead
        self._joining: list[Sequence] = []  # running requests that do not yet
        self._first: list[tuple[list[Sequence], Readback]] = []  # first tokens that the host has not read

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def check(self, request: Request) -> None:
        """Raise `TooLong` if a request would not fit into an empty pool."""
        read, size, strategy = request.ids.shape[1], self.pages.size, request.strategy
        pair, rows = self.start is not None, strategy.beams if isinstance(strategy, Beam) else 1
        tokens = (1 if pair else read) + request.longest
        if self.limits.reproducible and (tokens > self.longest[0] or (pair and read > self.longest[1])):
            raise TooLong(f"{tokens} tokens of prompt and answer: a reproducible engine has {self.longest[0]} at most")
        needed, across = rows * count_pages_for(tokens, size), count_pages_for(read, size) if pair else 0
        for count, total in ((needed, self.pages.own.total), (across, self.pages.source.total)):
            if count > total:
                raise TooLong(f"the request needs {count} pages of the KV cache, which has {total}")

    def add(self, sequence: Sequence) -> None:
        sequence.begin(self.start, self.device)
        self.waiting.append(sequence)

    @torch.no_grad()
    def step(self, out: Outbox) -> None:
        if self._cancelled():
            self._fall_back(out)
            for sequence in self._cancelled():  # some may have ended
                self._finish(sequence, out, "cancelled")
        for part in _by_model(self._next_prefill(out)):
            self._prefill(part, out)
        if not (self._runs_ahead() and self._decode_ahead(out)):
            self._fall_back(out)
            for part in _by_model(self._reserve()):
                self._decode([s for s in part if s.tables], out)
        self.stats.pages_used = self.pages.own.used

    def _cancelled(self) -> list[Sequence]:
        return list(filter(attrgetter("cancelled"), chain(self.waiting, self.prefilling, self.running)))

    # -- prefill ------------------------------------------------------------------------------------------------------

    def _next_prefill(self, out: Outbox) -> list[Sequence]:
        """Return the requests whose prompts are read in this step; waiting ones join while rows and pages last."""
        used = sum(s.rows for s in (*self.prefilling, *self.running)) if self.waiting else 0
        while self.waiting and used + self.waiting[0].rows <= self.limits.max_rows:
            if not self.pages.admit(self.waiting[0], used):
                break
            sequence = self.waiting.popleft()
            used += sequence.rows
            self.prefilling.append(sequence)
            out.start(sequence)
        if not self.prefilling or self.limits.reproducible:
            return self.prefilling[:1]
        chunk = self.limits.chunk
        first = self.prefilling[0].next_size(chunk)
        batch: list[Sequence] = []
        longest = 0
        # the oldest, and those of similar length, so that little is padded
        for sequence in sorted(self.prefilling, key=lambda s: abs(s.next_size(chunk) - first)):
            longest = max(longest, sequence.next_size(chunk))
            if batch and longest * (len(batch) + 1) > self.limits.prefill_tokens:
                break
            batch.append(sequence)
        return batch

    def _prefill(self, sequences: List[Sequence], out: Outbox) -> None:
        parts = {new: [s for s in sequences if s.has_source != new] for new in (True, False)}
        for with_sources, part in parts.items():
            if part:
                self._read_prompts(part, with_sources, out)

    def _read_prompts(self, sequences: List[Sequence], with_sources: bool, out: Outbox) -> None:
        model = self.models[sequences[0].request.adapter]
        rows = [_row(s, s.tables[0], s.part(self.limits.chunk)) for s in sequences]
        hidden = self.runner.prefill(model, rows, with_sources)
        complete: list[int] = []
        for i, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            before, sequence.read = sequence.read, sequence.read + len(row.new)
            sequence.has_source = True
            if sequence.request.prompt_logprobs and not sequence.answer:
                self._score_prompt(sequence, model, hidden[i, : len(row.new)], before)
            if sequence.read == sequence.length:
                complete.append(i)
                self.pages.remember(sequence)
        if not complete:
            return
        at, last = on_device([(i, len(rows[i].new) - 1) for i in complete], self.device).unbind(1)
        found = logits_of(model, hidden[at, last][:, None])[:, 0]
        ready = [sequences[i] for i in complete]
        started = set(ready)
        self.prefilling = [sequence for sequence in self.prefilling if sequence not in started]
        self.running.update(dict.fromkeys(ready))
        self._joining += ready
        if self.overlaps and all(sequence.can_wait for sequence in ready):
            both = torch.stack(choose(ready, found))
            begin = self.runner.first + sum(len(sequences) for sequences, _ in self._first)
            self.runner.newest[begin : begin + len(ready)] = both[0]
            self._first.append((ready, Readback(both)))
        else:
            self._choose(ready, found, out)

    def _score_prompt(self, sequence: Sequence, model: Transformer, hidden: Tensor, before: int) -> None:
        """Store the log-probabilities of the tokens that follow hidden states [t, d] from position `before` on."""
        targets = list(sequence.prompt[before + 1 : before + 1 + len(hidden)])
        for at in range(0, len(targets), SCORED_ROWS):
            ids = targets[at : at + SCORED_ROWS]
            logits = logits_of(model, hidden[at : at + len(ids), None])[:, 0]
            sequence.prompt_scores += score(logits, ids, sequence.request.top or 0)

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _reserve(self) -> list[Sequence]:
        """Give each running request a page for its next token, the oldest first; return those that have one."""
        ready: list[Sequence] = []
        for sequence in sorted(self.running, key=lambda s: s.arrived):
            while sequence.tables and not self.pages.extend(sequence, sequence.read):
                newest = max((*self.prefilling, *self.running), key=lambda s: s.arrived)
                self._preempt(newest)
                if newest is sequence:
                    break
            else:
                ready.append(sequence)
        return [sequence for sequence in ready if sequence.tables]

    def _preempt(self, sequence: Sequence) -> None:
        """Take the pages of a request; it waits, first in the queue, and is read again."""
        started = sequence in self.running
        self._remove(sequence)
        self.pages.release(sequence, clean=started)
        sequence.read, sequence.has_source, sequence.beams = 0, not sequence.source, None
        sequence.prompt_scores = sequence.prompt_scores if sequence.answer else []
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    # -- decoding a step ahead ----------------------------------------------------------------------------------------

    def _runs_ahead(self) -> bool:
        """Return whether the host need not know the newest tokens of the running requests before the next step."""
        if not self._joining:  # no request has been added to the batch
            return bool(self._batch or self._first)
        adapter = self._joining[0].request.adapter
        return all(s.can_wait and s.request.adapter == adapter for s in self.running)

    def _decode_ahead(self, out: Outbox) -> bool:
        """Run a step on tokens that may be known to the device only; then read its tokens, or those of the step before.

        Return False if a row has no page for its token.
        """
        batch = self._batch
        batch.drop_ended()
        if self._joining:
            first = chain.from_iterable(sequences for sequences, _ in self._first)
            batch.join(self._joining, {sequence: i for i, sequence in enumerate(first, self.runner.first)})
            self._joining = []
        if not batch.extend(self.pages):
            return False
        step = None
        if batch:
            model = self.models[batch.sequences[0].request.adapter]
            found = self.runner.decode(model, batch.rows, batch.greedy)
            if not batch.greedy:
                found = torch.stack(choose(batch.sequences, found[: len(batch)], batch.chosen))
                self.runner.newest[: len(batch)] = found[0]
            step = batch.advance(found)
        if self.overlaps:  # the tokens of this step are read while the next one runs
            step, batch.unread = batch.unread, step
        self._read_tokens(step, out)
        return True

    def _read_tokens(self, step: UnreadStep | None, out: Outbox) -> None:
        """Read the tokens of a step, and the first tokens that are known to the device only."""
        batch, first, self._first = self._batch, self._first, []
        if step is not None:
            ids, ok, ends = step.read()
            if not ok.all():
                batch.store(out)
                for i in (step.live & ~ok).nonzero()[0]:
                    self._finish(step.sequences[i], out, "error", NOT_FINITE)
            out.count_step(int((step.live & ok).sum()))
            batch.keep_tokens(step, ids)
            if ends.any() or (batch.streams and out.is_due()):
                batch.store(out)
            for i in ends.nonzero()[0]:
                self._finish_answer(step.sequences[i], out)
        for sequences, chosen in first:
            for sequence, id, valid in zip(sequences, *(x.tolist() for x in chosen.wait()), strict=True):
                self._append(sequence, id, valid, out)

    def _fall_back(self, out: Outbox) -> None:
        """Read all tokens, and let the host decode row by row until requests can run ahead again."""
        if self._batch or self._first or self._batch.unread is not None:
            self._read_tokens(self._batch.unread, out)
            self._batch.store(out)
            self._batch.clear()
        self._joining = list(self.running)

    # -- decoding with all tokens known -------------------------------------------------------------------------------

    def _decode(self, sequences: List[Sequence], out: Outbox) -> None:
        if not sequences:
            return
        model = self.models[sequences[0].request.adapter]
        rows = []
        for s in sequences:
            new = [[s.answer[-1]]] if s.beams is None else s.beams.search.newest.tolist()
            rows += [_row(s, table, ids) for table, ids in zip(s.tables, new, strict=True)]
        logits = self.runner.decode(model, StepRows(rows))[: len(rows)]
        for sequence in sequences:
            sequence.read += 1
        self._choose(sequences, logits, out)

    def _choose(self, sequences: List[Sequence], logits: Tensor, out: Outbox) -> None:
        """Choose the next tokens from logits of all rows, [rows, v]."""
        counts = [len(s.tables) for s in sequences]
        single = [s for s in sequences if s.options]
        parts = logits.split(counts) if len(single) < len(sequences) else ()
        for sequence, part in zip(sequences, parts, strict=bool(parts)):
            if sequence.options is None:
                self._search(sequence, part, out)
        if parts:
            rows = [part for s, part in zip(sequences, parts, strict=True) if s.options]
            logits = torch.cat(rows) if rows else logits
        if single:
            self._sample(single, logits, out)

    def _sample(self, sequences: List[Sequence], logits: Tensor, out: Outbox) -> None:
        over = [i for i, s in enumerate(sequences) if s.left == 0]  # only their prompts are scored
        for i in over:
            self._finish(sequences[i], out, "length")
        if over:
            keep = [i for i in range(len(sequences)) if i not in over]
            sequences, logits = [sequences[i] for i in keep], logits[keep]
        if not sequences:
            return
        chosen = choose(sequences, logits)
        ids, ok = chosen.ids.tolist(), chosen.ok.tolist()
        tokens = _score_all(sequences, logits, ids, ok)
        for i, (sequence, id) in enumerate(zip(sequences, ids, strict=True)):
            constraint = sequence.request.constraint
            if constraint is not None and sequence.state is not None:
                sequence.state = constraint.advance(sequence.state, chosen.ids[i : i + 1])
            self._append(sequence, id, ok[i], out, tokens.get(i))

    def _append(self, sequence: Sequence, id: int, ok: bool, out: Outbox, token: Token | None = None) -> None:
        """Add a token to an answer, and end the answer if it is the last."""
        if not ok:
            self._finish(sequence, out, "error", NOT_FINITE)
            return
        sequence.answer.append(id)
        out.token(sequence, token or Token(id))
        if id in sequence.request.stop_ids or sequence.left == 0:
            self._finish_answer(sequence, out)

    def _search(self, sequence: Sequence, logits: Tensor, out: Outbox) -> None:
        """Advance a beam search; its rows then share the pages of those that they continue."""
        if sequence.beams is None:
            sequence.beams = Beams(sequence.request, sequence.prompt, logits)
        else:
            sequence.beams.choose(logits)
        if sequence.beams.is_over:
            self._finish(sequence, out, "stop")
            return
        self.pages.continue_rows(sequence, sequence.beams.advance())

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _finish_answer(self, sequence: Sequence, out: Outbox) -> None:
        """End an answer that has its last token."""
        ended, constraint = sequence.answer[-1] in sequence.request.stop_ids, sequence.request.constraint
        if ended and constraint is not None and sequence.state is not None and not constraint.accepting(sequence.state):
            self._finish(sequence, out, "error", DEAD_END)
        else:
            self._finish(sequence, out, "stop" if ended else "length")

    def _finish(self, sequence: Sequence, out: Outbox, reason: Reason, message: str = "") -> None:
        self._remove(sequence)
        self._batch.end(sequence)
        complete, end = reason in ("stop", "length"), sequence.end(reason, message)
        if sequence.beams is not None and complete:
            end = sequence.end_search(sequence.beams.found())
        elif complete:
            self.pages.remember(sequence)
        self.pages.release(sequence, clean=end.message != NOT_FINITE and complete)
        out.finish(sequence, end)

    def _remove(self, sequence: Sequence) -> None:
        """Take a request out of its queue."""
        if sequence in self.running:
            del self.running[sequence]
            if sequence in self._joining:
                self._joining.remove(sequence)
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def fail(self, out: Outbox, message: str) -> None:
        self._batch.clear()
        self._joining, self._first = [], []
        for sequence in (*self.waiting, *self.prefilling, *self.running):
            self._finish(sequence, out, "error", message)


def _longest(body: Transformer, limits: Limits, pool: int) -> tuple[int, int]:
    """Return the most tokens that a row of the decoder and a source may have; fixed shapes are of this size."""
    if not limits.reproducible:
        return pool, pool
    prompt, new = (limit or REPRODUCIBLE_TOKENS // 2 for limit in (limits.max_prompt, limits.max_new_tokens))
    return (1 + new if body.encoder else prompt + new), prompt


def _score_all(sequences: List[Sequence], logits: Tensor, ids: list[int], ok: list[bool]) -> dict[int, Token]:
    """Return the tokens, by row, of the requests that want log-probabilities; those of equal `top` in one call."""
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.request.top is not None and ok[i]:
            groups.setdefault(sequence.request.top, []).append(i)
    found: dict[int, Token] = {}
    for top, rows in groups.items():
        found.update(zip(rows, score(logits[rows], [ids[i] for i in rows], top), strict=True))
    return found


def _row(sequence: Sequence, table: list[int], new: list[int]) -> Row:
    return Row(table, sequence.read, new, sequence.source_pages, sequence.source)


def _by_model(sequences: Iterable[Sequence]) -> list[list[Sequence]]:
    """Group requests by adapter: each has its own weights."""
    groups: dict[str | None, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.request.adapter, []).append(sequence)
    return list(groups.values())
