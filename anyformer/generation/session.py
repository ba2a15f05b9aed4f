"""A decoding session: rows of tokens being continued, their KV cache, and the logits of the next token.

Every strategy is a loop over one: it uses `logits`, chooses tokens and calls `read`. Beam search also reorders rows,
and speculative decoding drops tokens. So prompts of unequal length, both model shapes and all caches are handled once.
A strategy whose steps need nothing from the host calls `run_step`: on a GPU the whole step is replayed as one graph.
"""

import warnings
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from anyformer.attention.cache.kv_cache import Cache, CacheKind
from anyformer.attention.layout import check, check_values, choose_segments, real
from anyformer.config import ConfigError, Fault
from anyformer.generation import buffers
from anyformer.generation.buffers import DecodeBuffers
from anyformer.generation.constraints.constraint import check_fit
from anyformer.generation.constraints.rollback import ConstraintMask
from anyformer.generation.logit_processors import History, Processor, build
from anyformer.generation.prefill import Prompts, can_capture, prefill, prefill_captured, start_ids
from anyformer.generation.prefix_cache import Fingerprint, Reuse
from anyformer.generation.request import Request
from anyformer.generation.step import compiled, step
from anyformer.kernels.conventions import PADDING, Note
from anyformer.kernels.prepacked import PrepackedWeights, use_prepacked
from anyformer.kernels.runtime import HALF, HAS_TRITON
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.substitute import substitute

T = TypeVar("T")


class Session:
    """Prompts or sources of a request, read, and ready to be continued. Use within `evaluating(model)`.

    Each prompt has `copies` rows, side by side. There are slots for the request's largest budget and `extra` tokens, of
    which `slack` can be dropped at once. On a GPU single tokens are read by a graph, so that `hidden` and `logits` are
    overwritten by the next `read`. Close a session at its end: the next one of the same shapes takes its buffers, and
    the request's `reuse` remembers its texts.
    """

    def __init__(self, model: Transformer, request: Request, *, extra: int = 0, slack: int = 0, copies: int = 1):
        if not model.config.generates:
            raise ValueError("decoding needs a decoder with an `lm` head")
        substitute(model)
        self.model, self.compile, self._copies = model, request.compile, copies
        sizes, prompts = _checked_prompts(model, request)
        device, pair, budget = prompts.inputs.device, model.encoder is not None, request.longest + extra
        # a marked token is seen from beyond any window, so that no ring will do
        kind: CacheKind = "static" if request.marks is not None and request.cache == "auto" else request.cache
        ids = start_ids(model, sizes[0], device) if pair else prompts.inputs
        self.prompt_ids = ids  # as given
        self._reuse = request.reuse
        self._fingerprint: Fingerprint | None = None  # with `reuse`: of the model at the beginning
        if request.reuse is not None:
            like = model.new_cache(0, ids.shape[1] + budget, kind=kind, slack=slack)
            prompts = _with_prefixes(prompts, request.reuse, model, like)
            ids, self._fingerprint = prompts.inputs, request.reuse.model
        elif not pair:
            prompts = prompts.aligned()
            ids = prompts.inputs
        self.prompt_length = self.length = ids.shape[1]
        self.position_bound = _position_bound(ids, None if pair else prompts.segments)
        slots = self.prompt_length + budget
        self._key: Hashable = None
        self._captures = buffers.captures(device)
        if request.marks is None and request.media is None and self._captures:
            source = (sizes[1], prompts.segments is None) if pair else None
            self._key = buffers.key_of(
                model, len(ids), copies, slots, budget, source, kind, slack, request.compile, request.reuse is None
            )
        own = None if self._key is None else buffers.take_buffers(model, self._key)
        if own is None:
            own_prompts = model.new_cache(len(ids), slots, kind=kind, slack=slack)
            rows = own_prompts if copies == 1 else model.new_cache(copies * len(ids), slots, kind=kind, slack=slack)
            if copies > 1 and _can_share_rows(rows) and request.reuse is None:
                rows.share_rows()
            own = DecodeBuffers(rows, own_prompts)
        self.buffers, self.cache, self._ids, self._present = own, own.cache, own.ids, own.present
        # of the last tokens read [rows, n, d], and of the next token [rows, v]
        self.hidden, self.logits = self._prefill(prompts, sizes)
        assert model.decoder is not None
        self.limit = min((limit for limit, _ in model.decoder.ends), default=None)  # of positions
        self._in_step, self._prepacked, self._budget = False, PrepackedWeights(), budget
        self.fits = self.limit is None or self.position_bound + request.longest <= self.limit  # all positions
        if own.cache.recomputes and request.cache != "none":
            _say_why(model)
        if slack:  # so that dropped tokens leave no gaps; ids and history then have all slots
            self.cache.split_rows()
            self.length = slots

    def _prefill(self, prompts: Prompts, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
        own, model = self.buffers, self.model
        at_once = self._reuse is None and (prompts.chunk is None or prompts.chunk >= self.prompt_length)
        segmented = model.encoder is None and prompts.segments is not None and not prompts.right_padded
        if self._key is not None and at_once and can_capture(model, own, sizes, self.prompt_length, segmented):
            read = prefill_captured(model, own, self._copies, prompts)
            own.prompts.taken = own.cache.taken = self.prompt_length  # a replayed graph does not count slots
            return read
        if self._key is not None:
            own.reset()
        read = prefill(model, own, self._copies, prompts)
        if self._key is None:
            own.prompts = own.cache  # frees the prompts' cache: no other call uses these buffers
        return read

    @property
    def ids(self) -> Tensor:
        """All ids read, prompts and answers [rows, n]."""
        return self._ids[:, : self.length]

    @property
    def present(self) -> Tensor:
        """Mask of `ids`: True for tokens, False for gaps, bool [rows, n]."""
        return self._present[:, : self.length]

    def read(self, new: Tensor, present: Tensor | None = None) -> Tensor:
        """Read n tokens more [rows, n], where `present`; return the logits after each of them [rows, n, v]."""
        if self.cache.by_row:
            return self._read_by_row(new, torch.ones_like(new, dtype=torch.bool) if present is None else present)
        if self._in_step:  # the slot is counted on the device
            assert present is not None
            self._ids.index_copy_(1, self.cache.length[None], new)  # before the step, which increments the length
            self._present.index_copy_(1, self.cache.length[None], present)
            return self._step(new, present)[1]
        after = self.length + new.shape[1]
        self.position_bound += new.shape[1]
        if new.shape[1] > 1 or self._near_limit():
            with use_prepacked(self._prepacked, new.numel()):
                self.hidden, logits = step(self.model, self.cache, new, present, self.position_bound)
        elif not self._captures:
            run = partial(self._step, new, present)
            self.hidden, logits = self._counted(run) if self.compile else run()
        else:
            fixed = self.buffers.keep("read", lambda: (new.clone(), torch.ones_like(new, dtype=torch.bool)))
            fixed[0].copy_(new)
            fixed[1].fill_(True) if present is None else fixed[1].copy_(present)
            self.hidden, logits = self._counted(lambda: self.buffers.run("read", lambda: self._step(*fixed)))
        self._ids[:, self.length : after] = new
        self._present[:, self.length : after] = True if present is None else present
        self.length, self.logits = after, logits[:, -1]
        return logits

    def _read_by_row(self, new: Tensor, present: Tensor) -> Tensor:
        """Do the same where each row has separate slots; single tokens of a draft model are read by a graph."""
        if new.shape[1] > 1 or self._in_step or not self.fits or not self._captures:
            self.hidden, logits = self._step_by_row(new, present)
        else:
            fixed = self.buffers.keep("read", lambda: (new.clone(), present.clone()))
            fixed[0].copy_(new)
            fixed[1].copy_(present)
            self.hidden, logits = self.buffers.run("read", lambda: self._step_by_row(*fixed))
        self.logits = logits[:, -1]
        return logits

    def _step_by_row(self, new: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        slots = self.cache.slots_of(present)
        self._ids.scatter_(1, slots, new)
        self._present.scatter_(1, slots, present)
        with use_prepacked(self._prepacked, new.numel(), self._budget // new.shape[1]):
            if self.compile and self.fits:
                out: tuple[Tensor, Tensor] = compiled(step, id(self.model), *new.shape)(
                    self.model, self.cache, new, present
                )
                return out
            return step(self.model, self.cache, new, present, bound=0 if self.fits else None)

    def run_first(self, choose: Callable[[Tensor], None], key: Hashable | None) -> None:
        """Choose from the logits of the prompts, before the loop; `key` as in `run_step`."""
        if key is None or not self._captures:
            choose(self.logits)
            return
        fixed = self.buffers.keep("first", self.logits.clone)
        fixed.copy_(self.logits)
        self.buffers.run(("first", key), lambda: choose(fixed))

    def run_step(self, move: Callable[[], None], key: Hashable | None) -> None:
        """Run one step of a loop, which reads a token once; where each row has separate slots, any tokens.

        With a key the step may be captured: `move` does nothing but read, and change tensors with fixed addresses, in
        the same way under the same key.
        """
        by_row = self.cache.by_row
        if key is None or not self._captures or (not by_row and self._near_limit(1)):
            move()
            return
        self._in_step = True
        try:
            if by_row:
                self.buffers.run(key, move)
                return
            self._counted(lambda: self.buffers.run(key, move))
        finally:
            self._in_step = False
        self.length, self.position_bound = self.length + 1, self.position_bound + 1

    def _step(self, new: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
        with use_prepacked(self._prepacked, new.numel(), self._budget):
            if not self.compile:
                return step(self.model, self.cache, new, present, bound=0)  # the position is known to fit
            run = compiled(step, id(self.model), len(new))
            out: tuple[Tensor, Tensor] = run(self.model, self.cache, new, present)
            return out

    def _near_limit(self, more: int = 0) -> bool:
        """Return whether the next tokens may pass the last position, so that the model has to check."""
        return self.limit is not None and self.position_bound + more > self.limit

    def _counted(self, run: Callable[[], T]) -> T:
        """Run a step of one token and count its slot here: a compiled or captured step does not."""
        before = self.cache.taken
        self.cache.reserve(1)
        after, self.cache.taken = self.cache.taken, before
        out = run()
        self.cache.taken = after
        return out

    def close(self) -> None:
        """Release the buffers and remember the texts for `reuse`; nothing of the session may be read any more."""
        if self._reuse is not None:
            texts = _token_rows(self.ids, self.present)
            first = {row: texts[row] for row in range(0, len(texts), self._copies)}
            self._reuse.keep(self.model, self._fingerprint, self.cache, first)
        if self._key is not None:
            buffers.release_buffers(self.model, self._key, self.buffers)

    def forget(self, n: Tensor) -> None:
        """Drop the newest n [rows] tokens of each row, in a session with `slack`; `logits` are valid after a `read`."""
        self.cache.forget(n)
        self._present.copy_(real(self.cache.segments))

    def reorder(self, rows: Tensor) -> None:
        """Continue row i from row `rows[i]` of the same prompt, which was `present` in the same steps.

        `logits` are valid again after the next `read`.
        """
        self.cache.reorder(rows, group_size=self._copies)
        self._ids.copy_(self._ids[rows])

    @property
    def history(self) -> History:
        """The input of logit processors; in a captured step it has all slots, those not yet filled too."""
        ids, present = (self._ids, self._present) if self._in_step else (self.ids, self.present)
        new = torch.arange(ids.shape[1], device=ids.device) >= self.prompt_length
        return History(ids, present, new.expand_as(present))

    def processors(self, request: Request) -> tuple[Processor, ...]:
        """Return what changes the logits of a request: the caller's functions, its constraint and its options."""
        vocab, device, stop, allowed = self.logits.shape[-1], self.ids.device, request.stop_ids, None
        if request.constraint is not None:
            check_fit(request.constraint, vocab, stop)
            budgets = [budget for budget in request.budgets for _ in range(self._copies)]
            allowed = ConstraintMask(request.constraint, budgets, device)
        own = build(request.strategy, vocab=vocab, stop=stop, allowed=allowed, device=device)
        return (*request.processors, *own)

    def fill_id(self, stop: tuple[int, ...]) -> int:
        """Return the id that fills a row after its end."""
        pad = self.model.config.special.pad
        return pad if pad is not None else (stop[0] if stop else 0)


def _checked_prompts(model: Transformer, request: Request) -> tuple[tuple[int, int], Prompts]:
    """Return the size (rows, length) of the inputs, and these, checked against the model."""
    reader = model.source or model.target
    assert reader is not None
    ids, marks, media = request.ids, request.marks, request.media
    batch, length = reader.measure(ids)
    if reader.vocab:
        _check_ids(ids, reader.vocab)
    if given := [name for name in ("top", "prompt_logprobs", "adapter") if getattr(request, name) not in (None, False)]:
        raise ConfigError(Fault(name, "is for requests to an engine: leave it out") for name in given)
    segments = choose_segments(batch, length, request.segments, request.attention_mask)
    own, mask = (None if x is None else x.cpu() for x in (request.segments, request.attention_mask))
    check_values(own, mask)
    if model.encoder is not None and marks is not None:
        raise ValueError("only a decoder without an encoder reads marked prompts: leave `marks` out")
    if marks is not None or media is not None:
        what = "is not for prompts that see all of themselves, or that have images: these are read at once"
        options = (("chunk", request.chunk), ("reuse", request.reuse))
        if unused := [name for name, value in options if value is not None]:
            raise ConfigError(Fault(name, what) for name in unused)
    if marks is not None:
        check(*ids.shape, marks=marks)
    if model.encoder is not None and request.reuse is not None:
        raise ValueError("only a decoder without an encoder has prompts to reuse: leave `reuse` out")
    segments = None if segments is None else segments.expand(batch, length)
    return (batch, length), Prompts(ids, segments, marks, request.chunk, media=media)


@cache
def _say(kinds: str) -> None:
    what = "each new token takes the time of reading the whole text"
    warnings.warn(f"mixers that store nothing ({kinds}): {what}", Note, stacklevel=2)


def _say_why(model: Transformer) -> None:
    """Say once why each step reads the whole text."""
    assert model.config.decoder is not None
    mixers = [block.mixer for block in model.config.decoder.unrolled()]
    _say(", ".join(dict.fromkeys(mixer.kind for mixer in mixers if mixer.stores(model.config.width) is None)))


def _can_share_rows(rows: Cache) -> bool:
    """Return whether beams read each other's keys and values in the cache: by the kernel of few queries."""
    stored = [x for layer in rows.layers for x in layer.own()]
    return (
        not rows.recomputes
        and HAS_TRITON
        and rows.length.is_cuda
        and all(x.dtype in HALF for x in stored if x.dim() == 4)
    )


def _with_prefixes(prompts: Prompts, reuse: Reuse, model: Transformer, like: Cache) -> Prompts:
    """Return prompts [b, t] with the known beginning of each on the left and the rest aligned after the longest.

    Only beginnings that fit a cache `like` this are used.
    """
    ids, segments = prompts.inputs, prompts.segments
    rows = _token_rows(ids, torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments))
    prefixes = reuse.find(model, like, rows)
    known = max(prefix.length for prefix in prefixes)
    rest = max(len(row) - prefix.length for row, prefix in zip(rows, prefixes, strict=True))
    out = torch.zeros(len(rows), known + rest, dtype=torch.long)
    segments = torch.full_like(out, PADDING)
    for i, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        for at, part in ((0, row[: prefix.length]), (known, row[prefix.length :])):
            out[i, at : at + len(part)] = torch.tensor(part, dtype=torch.long)
            segments[i, at : at + len(part)] = 0
    return prompts._replace(inputs=out.to(ids.device), segments=segments.to(ids.device), prefixes=prefixes)


def _position_bound(ids: Tensor, segments: Tensor | None) -> int:
    """Return a bound that exceeds every position of the prompts, none of which may be empty."""
    if segments is None and ids.shape[1]:
        return ids.shape[1]
    lengths = real(torch.zeros_like(ids) if segments is None else segments).sum(dim=1).tolist()
    if 0 in lengths:
        empty = lengths.index(0)
        raise ValueError(f"prompt {empty} is empty: give it at least one token, such as the start of a text")
    return max(lengths, default=0)


def _token_rows(ids: Tensor, present: Tensor) -> list[list[int]]:
    """Return the ids of each row without gaps."""
    return [row[tokens].tolist() for row, tokens in zip(ids.cpu(), present.cpu(), strict=True)]


def _check_ids(ids: Tensor, vocab: int) -> None:
    """Raise a clear error for ids outside the vocabulary: on a GPU the lookup would abort the process."""
    wrong = (ids < 0) | (ids >= vocab)
    if bool(wrong.any()):
        row, first = int(wrong.any(dim=1).nonzero()[0]), int(ids[wrong][0])
        raise ValueError(f"prompt {row}: id {first} is outside the vocabulary of {vocab}")
