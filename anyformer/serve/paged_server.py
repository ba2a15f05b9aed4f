"""Continuous batching over a paged KV cache: requests join and leave at every step.

A step reads one batch of prompts (prefill), at most `prefill_tokens` in chunks of at most `chunk`, and one more token
of every running request. Where pages run out, the newest request gives its pages back and is read again later.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence as List

import torch
from torch import Tensor

from anyformer.decoding.strategy import Beam
from anyformer.nn.model import Transformer
from anyformer.serve.beams import Beams
from anyformer.serve.job import Job, Outbox
from anyformer.serve.pages import Pages, count_pages_for
from anyformer.serve.pool import count_pages, new_pool
from anyformer.serve.readback import Unread, can_wait
from anyformer.serve.request import Generation, Limits, Reason, Token, TooLong
from anyformer.serve.runner import Row, Runner, next_logits
from anyformer.serve.sampler import choose, is_greedy, score
from anyformer.serve.sequence import Sequence, on_device
from anyformer.serve.stats import Stats

NOT_FINITE = "the model's logits are not finite"
REPRODUCIBLE_TOKENS = 4096  # of prompt and answer in a reproducible engine that sets no such limits
SCORED_ROWS = 64  # prompt tokens whose logits are in memory at once


class PagedServer:
    """Answers the requests of one model, and of the same model with adapters by name."""

    def __init__(self, body: Transformer, limits: Limits, adapters: Mapping[str, Transformer]):
        assert body.decoder is not None
        self.models: dict[str | None, Transformer] = {None: body}
        self.models.update(adapters)
        self.limits, self.stats = limits, Stats()
        self.device = next(body.parameters()).device
        self.start = body.config.special.start if body.encoder is not None else None
        own, across = count_pages(body, limits)
        self.pages, self.source_pages = Pages(own, limits.page_size), Pages(across, limits.page_size)
        self.pool = new_pool(body, (own, across), limits.page_size, limits.int8)
        self.longest = _longest(body, limits, self.pages.total * limits.page_size)
        widest = [self.longest[0] // limits.page_size + 1, count_pages_for(self.longest[1], limits.page_size)]
        self.runner = Runner(self.pool, limits, self.device, (widest[0], max(widest[1], 1)))
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.stats.pages = self.pages.total
        self.overlaps = self.device.type == "cuda"  # whether tokens are read one step late
        self._unread = Unread()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running or self._unread.parts)

    def check(self, generation: Generation) -> None:
        """Raise `TooLong` if a request would not fit into an empty pool."""
        read, size, strategy = len(generation.ids), self.pages.size, generation.strategy
        pair, rows = self.start is not None, strategy.beams if isinstance(strategy, Beam) else 1
        tokens = (1 if pair else read) + generation.max_new_tokens
        if tokens > self.longest[0] or (pair and read > self.longest[1]):
            raise TooLong(f"{tokens} tokens of prompt and answer: a reproducible engine has {self.longest[0]} at most")
        needed, across = rows * count_pages_for(tokens, size), count_pages_for(read, size) if pair else 0
        for count, total in ((needed, self.pages.total), (across, self.source_pages.total)):
            if count > total:
                raise TooLong(f"the request needs {count} pages of the KV cache, which has {total}")

    def add(self, job: Job) -> None:
        sequence = Sequence(job, self.start, self.device)
        sequence.can_wait = can_wait(sequence)
        self.waiting.append(sequence)

    @torch.no_grad()
    def step(self, out: Outbox) -> None:
        for sequence in [s for s in (*self.waiting, *self.prefilling, *self.running) if s.job.cancelled]:
            self._finish(sequence, out, "cancelled")
        batch = self._next_prefill(out)
        for part in _by_model(batch):
            self._prefill(part, out)
        groups = _by_model(self._reserve(out))
        if self.overlaps and len(groups) == 1 and all(s.can_wait for s in groups[0]):
            self._decode_ahead(groups[0], out)
        else:
            self._settle(out)
            for part in groups:
                self._decode([s for s in part if s.tables], out)
        self.stats.pages_used = self.pages.used

    # -- prefill ------------------------------------------------------------------------------------------------------

    def _next_prefill(self, out: Outbox) -> list[Sequence]:
        """Return the requests whose prompts are read in this step; waiting ones join while rows and pages last."""
        used = sum(s.rows for s in (*self.prefilling, *self.running)) if self.waiting else 0
        while self.waiting and self._admit(self.waiting[0], used):
            sequence = self.waiting.popleft()
            used += sequence.rows
            self.prefilling.append(sequence)
            out.start(sequence.job)
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

    def _admit(self, sequence: Sequence, used: int) -> bool:
        """Take rows, of which some are used, and pages for a waiting request, as far as its prompt needs them."""
        if used + sequence.rows > self.limits.max_rows:
            return False
        known = self._known_pages(sequence)
        self.pages.share(known)
        tokens = sequence.length + 1
        if self.limits.reproducible:  # never preempted: read again, its tokens would be rounded differently
            tokens = len(sequence.prompt) + sequence.generation.max_new_tokens
        needed = count_pages_for(tokens, self.pages.size) - len(known)
        margin = 0 if self.limits.reproducible else used  # each row that decodes soon needs a page
        new = self.pages.take(needed) if needed + margin <= self.pages.available else None
        source = self.source_pages.take(count_pages_for(len(sequence.source), self.pages.size))
        if new is None or source is None:
            self.pages.release([*known, *(new or ())])
            self.source_pages.release(source or ())
            return False
        sequence.tables, sequence.source_pages = [[*known, *new]], source
        sequence.read = len(known) * self.pages.size
        if not sequence.answer:
            sequence.cached = min(sequence.read, len(sequence.prompt))
        return True

    def _known_pages(self, sequence: Sequence) -> list[int]:
        """Return the pages of its beginning that are in the cache. The last token is always read, for its logits."""
        if not self.limits.reuse or sequence.source or sequence.generation.prompt_logprobs:
            return []
        most = (sequence.length - 1) // self.pages.size
        known = self.pages.find(key for key, _ in zip(sequence.keys(self.pages.size), range(most), strict=False))
        if self.limits.reproducible:  # chunks begin where they would without reuse
            whole = len(known) * self.pages.size // self.limits.chunk * self.limits.chunk
            known = known[: whole // self.pages.size]
        return known

    def _prefill(self, sequences: List[Sequence], out: Outbox) -> None:
        parts = {new: [s for s in sequences if s.has_source != new] for new in (True, False)}
        for with_sources, part in parts.items():
            if part:
                self._read_prompts(part, with_sources, out)

    def _read_prompts(self, sequences: List[Sequence], with_sources: bool, out: Outbox) -> None:
        model = self.models[sequences[0].generation.adapter]
        rows = [_row(s, s.tables[0], s.part(self.limits.chunk)) for s in sequences]
        hidden = self.runner.prefill(model, rows, with_sources)
        complete: list[int] = []
        for i, (sequence, row) in enumerate(zip(sequences, rows, strict=True)):
            before, sequence.read = sequence.read, sequence.read + len(row.new)
            sequence.has_source = True
            if sequence.generation.prompt_logprobs and not sequence.answer:
                self._score_prompt(sequence, model, hidden[i, : len(row.new)], before)
            if sequence.read == sequence.length:
                complete.append(i)
                self._remember(sequence)
        if not complete:
            return
        at, last = on_device([(i, len(rows[i].new) - 1) for i in complete], self.device).unbind(1)
        found = next_logits(model, hidden[at, last])
        ready = [sequences[i] for i in complete]
        for sequence in ready:
            self.prefilling.remove(sequence)
            self.running.append(sequence)
        if self.overlaps and all(sequence.can_wait for sequence in ready):
            self._unread.add(ready, torch.stack(choose(ready, found)))
        else:
            self._choose(ready, found, out)

    def _score_prompt(self, sequence: Sequence, model: Transformer, hidden: Tensor, before: int) -> None:
        """Store the log-probabilities of the tokens that follow hidden states [t, d] from position `before` on."""
        targets = list(sequence.prompt[before + 1 : before + 1 + len(hidden)])
        for at in range(0, len(targets), SCORED_ROWS):
            ids = targets[at : at + SCORED_ROWS]
            logits = next_logits(model, hidden[at : at + len(ids)])
            sequence.prompt_scores += score(logits, ids, sequence.generation.top or 0)

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _reserve(self, out: Outbox) -> list[Sequence]:
        """Give each running request a page for its next token, the oldest first; return those that have one."""
        ready: list[Sequence] = []
        for sequence in sorted(self.running, key=lambda s: s.order):
            while sequence.tables and not self._extend(sequence):
                if self._unread.parts:  # requests that end with them free pages
                    self._settle(out)
                    continue
                newest = max((*self.prefilling, *self.running), key=lambda s: s.order)
                self._preempt(newest)
                if newest is sequence:
                    break
            else:
                ready.append(sequence)
        return [sequence for sequence in ready if sequence.tables]

    def _extend(self, sequence: Sequence) -> bool:
        """Make the page of the next token of each row writable: present, and used by no other row."""
        at = sequence.read // self.pages.size
        copies: list[tuple[int, int]] = []
        for table in sequence.tables:
            if at < len(table) and not self.pages.is_shared(table[at]):
                continue
            new = self.pages.take(1)
            if new is None:
                self.pool.copy(copies)
                return False
            if at < len(table):
                copies.append((table[at], new[0]))
                self.pages.release([table[at]])
                table[at] = new[0]
            else:
                table += new
        self.pool.copy(copies)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take the pages of a request; it waits, first in the queue, and is read again."""
        started = sequence in self.running
        (self.running if started else self.prefilling).remove(sequence)
        self._release(sequence, clean=started)
        sequence.read, sequence.has_source, sequence.beams = 0, not sequence.source, None
        sequence.prompt_scores = sequence.prompt_scores if sequence.answer else []
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _decode_ahead(self, sequences: List[Sequence], out: Outbox) -> None:
        """Run a step on tokens that may be known to the device only; then read those of the step before."""
        sequences = [s for s in sequences if s.left > 0]
        if sequences:
            model = self.models[sequences[0].generation.adapter]
            newest, ids = self._unread.newest(sequences)
            rows = [_row(s, s.tables[0], [id]) for s, id in zip(sequences, newest, strict=True)]
            plain = is_greedy(sequences)
            found = self.runner.decode(model, rows, ids, plain)
            chosen = found.clone() if plain else torch.stack(choose(sequences, found))
            for sequence in sequences:
                sequence.read += 1
        self._settle(out)
        if sequences:
            self._unread.add(sequences, chosen)

    def _settle(self, out: Outbox) -> None:
        """Read the tokens that are known to the device only."""
        for part in self._unread.pop():
            for sequence, id, ok in zip(part.sequences, *part.wait(), strict=True):
                if sequence.tables:  # otherwise it was cancelled
                    self._append(sequence, id, bool(ok), out)

    def _decode(self, sequences: List[Sequence], out: Outbox) -> None:
        if not sequences:
            return
        model = self.models[sequences[0].generation.adapter]
        rows = []
        for s in sequences:
            new = [[s.answer[-1]]] if s.beams is None else [[int(id)] for id in s.beams.ids[:, -1]]
            rows += [_row(s, table, ids) for table, ids in zip(s.tables, new, strict=True)]
        logits = self.runner.decode(model, rows)
        for sequence in sequences:
            sequence.read += 1
        self._choose(sequences, logits, out)

    def _choose(self, sequences: List[Sequence], logits: Tensor, out: Outbox) -> None:
        """Choose the next tokens from logits of all rows, [rows, v]."""
        counts = [len(s.tables) for s in sequences]
        single = [s for s in sequences if not s.job.search]
        parts = logits.split(counts) if len(single) < len(sequences) else ()
        for sequence, part in zip(sequences, parts, strict=bool(parts)):
            if sequence.job.search:
                self._search(sequence, part, out)
        if parts:
            rows = [part for s, part in zip(sequences, parts, strict=True) if not s.job.search]
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
            constraint = sequence.generation.constraint
            if constraint is not None and sequence.state is not None:
                sequence.state = constraint.advance(sequence.state, chosen.ids[i : i + 1])
            self._append(sequence, id, ok[i], out, tokens.get(i))

    def _append(self, sequence: Sequence, id: int, ok: bool, out: Outbox, token: Token | None = None) -> None:
        """Add a token to an answer, and end the answer if it is the last."""
        if not ok:
            self._finish(sequence, out, "error", NOT_FINITE)
            return
        sequence.answer.append(id)
        out.token(sequence.job, token or Token(id))
        if id in sequence.generation.stop or len(sequence.answer) == sequence.generation.max_new_tokens:
            self._finish(sequence, out, "stop" if id in sequence.generation.stop else "length")

    def _search(self, sequence: Sequence, logits: Tensor, out: Outbox) -> None:
        """Advance a beam search; its rows then share the pages of those that they continue."""
        if sequence.beams is None:
            sequence.beams = Beams(sequence.generation, sequence.prompt, logits)
        else:
            sequence.beams.choose(logits)
        if sequence.beams.is_over:
            self._finish(sequence, out, "stop")
            return
        parents = sequence.beams.advance()
        old = sequence.tables
        sequence.tables = [list(old[min(parent, len(old) - 1)]) for parent in parents]
        for table in sequence.tables:
            self.pages.share(table)
        for table in old:
            self.pages.release(table)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, out: Outbox, reason: Reason, message: str = "") -> None:
        queues: tuple[deque[Sequence] | list[Sequence], ...] = (self.waiting, self.prefilling, self.running)
        for queue in queues:
            if sequence in queue:
                queue.remove(sequence)
        found = None
        if reason == "stop" and sequence.beams is not None:
            found = sequence.beams.found()
            reason, message = ("stop", "") if found is not None else ("error", NOT_FINITE)
        if reason in ("stop", "length") and sequence.beams is None:
            self._remember(sequence)
        self._release(sequence, clean=reason in ("stop", "length"))
        out.finish(sequence.job, sequence.end(reason, message), found)

    def fail(self, out: Outbox, message: str) -> None:
        self._unread.pop()
        for sequence in (*self.waiting, *self.prefilling, *self.running):
            self._finish(sequence, out, "error", message)

    def _release(self, sequence: Sequence, clean: bool) -> None:
        pages = [page for table in sequence.tables for page in self.pages.release(table, clean)]
        self.pool.clear(pages)
        self.pool.clear_source(self.source_pages.release(sequence.source_pages, clean))
        sequence.tables, sequence.source_pages = [], []

    def _remember(self, sequence: Sequence) -> None:
        """Keep the full pages of a request for others that begin alike."""
        if not self.limits.reuse or sequence.source:
            return
        tokens = min(sequence.read, len(sequence.prompt)) if self.limits.reproducible else sequence.read
        full = tokens // self.pages.size
        keys = [key for key, _ in zip(sequence.keys(self.pages.size), range(full), strict=False)]
        self.pages.remember(sequence.tables[0][:full], keys)


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
        if sequence.generation.top is not None and ok[i]:
            groups.setdefault(sequence.generation.top, []).append(i)
    found: dict[int, Token] = {}
    for top, rows in groups.items():
        found.update(zip(rows, score(logits[rows], [ids[i] for i in rows], top), strict=True))
    return found


def _row(sequence: Sequence, table: list[int], new: list[int]) -> Row:
    return Row(table, sequence.read, new, sequence.source_pages, sequence.source)


def _by_model(sequences: Iterable[Sequence]) -> list[list[Sequence]]:
    """Group requests by adapter: each has weights of its own."""
    groups: dict[str | None, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.generation.adapter, []).append(sequence)
    return list(groups.values())
