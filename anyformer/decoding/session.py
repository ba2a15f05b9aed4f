"""A session: rows of text that are being continued, with the cache that knows them and the logits of what comes next.

Every strategy is a loop over one: it looks at `logits`, chooses, and `read`s what it chose; beam search also reorders
rows, speculation takes tokens back. So prompts of unequal length, both shapes and every cache are dealt with once.
A strategy whose steps ask nothing of the host lets the session `go`: on a GPU all of a step is replayed as one graph.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from anyformer.attention.layout import check, real
from anyformer.cache.kv_cache import CacheKind
from anyformer.config import LM, ConfigError, Fault
from anyformer.conventions import PADDING
from anyformer.decoding import buffers as places
from anyformer.decoding.buffers import DecodeBuffers, find_place, key_of, leave_place, parts_of
from anyformer.decoding.logit_processors import History
from anyformer.decoding.prefill import begin, begin_again, repeats, starts
from anyformer.decoding.prefix_cache import Begun, Fingerprint, Reuse
from anyformer.decoding.step import compiled, step
from anyformer.kernels.prepacked import PrepackedWeights, use_prepacked
from anyformer.nn.inputs import TokenInput
from anyformer.nn.model import Transformer

T = TypeVar("T")
Read = Callable[[Tensor, Tensor], Tensor]
"""Reads a token of each row [rows, 1], where it is there, bool [rows, 1]: the logits of the next [rows, v]."""


class Session:
    """Prompts [b, t], or sources [b, s] to be answered, read and ready to go on. Use within `evaluating(model)`.

    `copies` rows of each prompt stand side by side; `room` is for how many tokens more there is place, `slack` how many
    of them can be taken back at once. `chunk` tokens of a prompt are read at a time. `compile` pays where many tokens
    are read one by one; on a GPU these are replayed from a graph in any case, so that `hidden` and `logits` are written
    over at the next `read`. With `reuse`, what was read before of a prompt is not read again, and stands first. Tokens
    of a prompt that are marked as seen [b, t] are seen by all of it, so it is read at once, and anew. A session that
    is over is closed, so that the next one of the same shapes finds its place.
    """

    def __init__(
        self,
        model: Transformer,
        ids: Tensor,
        room: int,
        *,
        segments: Tensor | None = None,
        marks: Tensor | None = None,
        cache: CacheKind = "auto",
        slack: int = 0,
        copies: int = 1,
        chunk: int | None = None,
        compile: bool = False,
        reuse: Reuse | None = None,
    ):
        if not isinstance(model.config.head, LM) or model.decoder is None:
            raise ValueError("decoding needs a decoder with an `lm` head")
        read = model.source or model.target
        assert read is not None
        batch, length = read.measure(ids)
        if isinstance(read, TokenInput):
            _check_ids(ids, read.vocab)
        check(batch, length, segments=segments)
        segments = None if segments is None else segments.expand(batch, length)
        facts, source, source_segments = None, ids, segments
        if model.encoder is not None:
            ids, facts, segments = starts(model, batch, ids.device), (length, segments is None), None
        self.model, self.compile, self._copies = model, compile, copies
        if marks is not None:
            if model.encoder is not None:
                raise ValueError("only a decoder without an encoder reads marked prompts: leave `marks` out")
            what = "is not for prompts that see all of themselves: these are read at once"
            if idle := [name for name, given in (("chunk", chunk), ("reuse", reuse)) if given is not None]:
                raise ConfigError(Fault(name, what) for name in idle)
            cache = "static" if cache == "auto" else cache  # what is seen by all is seen from beyond any window
        check(*ids.shape, marks=marks)
        self.given = ids  # the prompts as they came
        self.since: Fingerprint | None = None  # with `reuse`: the fingerprint of the model at the beginning
        begun: list[Begun] = []
        if reuse is not None:
            if model.encoder is not None:
                raise ValueError("only a decoder without an encoder has prompts to reuse: leave `reuse` out")
            prompts = _rows(ids, torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments))
            like = model.new_cache(0, ids.shape[1] + room, kind=cache, slack=slack)
            begun, self.since = reuse.find(model, like, prompts), reuse.model
            ids, segments = _begun(prompts, begun, ids.device)
        self.prompt = self.length = self.bound = ids.shape[1]  # all positions are below the bound
        if segments is not None or not ids.shape[1]:
            counted = real(torch.zeros_like(ids) if segments is None else segments).sum(dim=1).tolist()
            self.bound = max(counted, default=0)
            if 0 in counted:
                empty = counted.index(0)
                raise ValueError(f"prompt {empty} is empty: give it at least one token, such as the start of a text")
        slots = self.prompt + room
        self._key: Hashable = None
        if marks is None and places.captures(ids.device):
            self._key = key_of(model, len(ids), copies, slots, room, facts, cache, slack, compile)
        place = None if self._key is None else find_place(model, self._key)
        if place is None:
            prompts_cache = model.new_cache(len(ids), slots, kind=cache, slack=slack)
            whole = prompts_cache
            if copies > 1:
                whole = model.new_cache(copies * len(ids), slots, kind=cache, slack=slack)
            place = DecodeBuffers(whole, prompts_cache)
        self.place, self.cache, self._ids, self._there = place, place.cache, place.ids, place.there
        given = (ids, segments) if model.encoder is None else (source, source_segments)
        at_once = self._key is not None and reuse is None and (chunk is None or chunk >= self.prompt)
        if at_once and repeats(model, place, batch * length, length, self.prompt, segments is not None):
            hidden, found = begin_again(model, place, copies, *given)
            place.prompts.taken = place.cache.taken = self.prompt  # a graph does not count
        else:
            if self._key is not None:
                place.reset()
            hidden, found = begin(model, place, copies, *given, marks=marks, begun=begun, chunk=chunk)
            if self._key is None:
                place.prompts = place.cache  # no one else comes
        self.hidden, self.logits = hidden, found  # of what was read last [rows, n, d], and of the next token [rows, v]
        self.limit = min((limit for limit, _ in model.decoder.ends), default=None)  # of positions
        self._whole, self._prepacked = False, PrepackedWeights()

    @property
    def ids(self) -> Tensor:
        """All that was read, prompts and answers [rows, n]."""
        return self._ids[:, : self.length]

    @property
    def there(self) -> Tensor:
        """Which of them are tokens, bool [rows, n]."""
        return self._there[:, : self.length]

    def read(self, new: Tensor, there: Tensor | None = None) -> Tensor:
        """Reads [rows, n] more tokens, those that are `there`; the logits after each of them [rows, n, v]."""
        after = self.length + new.shape[1]
        self.bound += new.shape[1]
        if new.shape[1] > 1 or self._near_the_end():
            with use_prepacked(self._prepacked, new.numel()):
                self.hidden, found = step(self.model, self.cache, new, there, self.bound)
        elif not places.captures(new.device):
            self.hidden, found = self._counted(lambda: self._step(new, there))
        else:
            mine = self.place.keep("read", lambda: (new.clone(), torch.ones_like(new, dtype=torch.bool)))
            mine[0].copy_(new)
            mine[1].fill_(True) if there is None else mine[1].copy_(there)
            self.hidden, found = self._counted(lambda: self.place.run("read", lambda: self._step(*mine)))
        self._ids[:, self.length : after] = new
        self._there[:, self.length : after] = True if there is None else there
        self.length, self.logits = after, found[:, -1]
        return found

    def first(self, choose: Callable[[Tensor], None], key: Hashable | None) -> None:
        """What is chosen from the logits of the prompts, before the loop; the key as in `go`."""
        if key is None or not places.captures(self.cache.length.device):
            choose(self.logits)
            return
        mine = self.place.keep("first", self.logits.clone)
        mine.copy_(self.logits)
        self.place.run(("first", key), lambda: choose(mine))

    def go(self, move: Callable[[Read], None], key: Hashable | None) -> None:
        """One step of a loop, which reads once. With a key, all that `move` does is to change tensors that stay where
        they are, the same under the same key: it may be captured."""
        if key is None or not places.captures(self.cache.length.device) or self._near_the_end(1):
            move(lambda new, there: self.read(new, there)[:, -1])
            return
        self._whole = True
        try:
            self._counted(lambda: self.place.run(key, lambda: move(self._read_unseen)))
        finally:
            self._whole = False
        self.length, self.bound = self.length + 1, self.bound + 1

    def _read_unseen(self, new: Tensor, there: Tensor) -> Tensor:
        """`read` where no host counts."""
        self._ids.index_copy_(1, self.cache.length[None], new)  # before the step, which counts on
        self._there.index_copy_(1, self.cache.length[None], there)
        return self._step(new, there)[1][:, -1]

    def _step(self, new: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor]:
        with use_prepacked(self._prepacked, new.numel()):
            if not self.compile:
                return step(self.model, self.cache, new, there, bound=0)  # there is no end, or it is far
            run = compiled(step, id(self.model), len(new))
            found: tuple[Tensor, Tensor] = run(self.model, self.cache, new, there)
            return found

    def _near_the_end(self, more: int = 0) -> bool:
        """Where positions may end the model itself has to look."""
        return self.limit is not None and self.bound + more > self.limit

    def _counted(self, run: Callable[[], T]) -> T:
        """Runs a step of one token; its slot is counted here, as a compiled or captured one does not."""
        before = self.cache.taken
        self.cache.reserve(1)
        after, self.cache.taken = self.cache.taken, before
        found = run()
        self.cache.taken = after
        return found

    def close(self) -> None:
        """It is over: nothing of it may be read any more."""
        if self._key is not None:
            leave_place(self.model, self._key, self.place)

    def forget(self, n: Tensor) -> None:
        """Takes the newest n [rows] tokens of each row back: read on before looking at `logits`."""
        self.cache.forget(n)
        self._there.copy_(real(self.cache.segments))
        index = torch.arange(1, self.length + 1, device=n.device)
        self.length = max(self.prompt, int(torch.where(self.there, index, 0).amax()))
        self.cache.truncate(self.length)
        self.bound = int(self.cache.following.max())

    def make_room(self, n: int) -> None:
        """Sees to it that n more tokens fit where some were taken back, by closing the gaps that they left."""
        if self.length + n > self.cache.slots:
            order = self.cache.compact(self.prompt)
            for x in (self._ids, self._there):
                x.copy_(x.gather(1, order))
            self.length = self.cache.taken

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from what row `rows[i]` was, one of the same prompt: read on before looking at `logits`."""
        self.cache.reorder(rows, group_size=self._copies)
        for x in (self._ids, self._there):
            x.copy_(x[rows])

    @property
    def answers(self) -> Tensor:
        """What was read after the prompts, [rows, new]."""
        return self.ids[:, self.prompt :]

    @property
    def history(self) -> History:
        """What processors look at; in a captured step with all that is not there yet."""
        ids, there = (self._ids, self._there) if self._whole else (self.ids, self.there)
        new = torch.arange(ids.shape[1], device=ids.device) >= self.prompt
        return History(ids, there, new.expand_as(there))

    def texts(self) -> list[list[int]]:
        """The ids that each row has read."""
        return _rows(self.ids, self.there)

    def filler(self, stop: Sequence[int]) -> int:
        """The id that stands behind the end of an answer."""
        pad = self.model.config.special.pad
        return pad if pad is not None else (stop[0] if stop else 0)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of ids side by side, padded on the right [b, t], and their segments where any is."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    if min(map(len, rows)) == longest:
        return ids, None
    return ids, torch.tensor([[0] * len(row) + [PADDING] * (longest - len(row)) for row in rows], device=device)


def _rows(ids: Tensor, there: Tensor) -> list[list[int]]:
    """The real ids of each row."""
    return [row[some].tolist() for row, some in zip(ids.cpu(), there.cpu(), strict=True)]


def _begun(prompts: list[list[int]], begun: list[Begun], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts [b, t] with what is known of each on the left and the rest side by side, and their segments."""
    known = max(one.length for one in begun)
    rest = max(len(ids) - one.length for ids, one in zip(prompts, begun, strict=True))
    out = torch.zeros(len(prompts), known + rest, dtype=torch.long)
    segments = torch.full_like(out, PADDING)
    for row, (ids, one) in enumerate(zip(prompts, begun, strict=True)):
        for at, part in ((0, ids[: one.length]), (known, ids[one.length :])):
            out[row, at : at + len(part)] = torch.tensor(part, dtype=torch.long)
            segments[row, at : at + len(part)] = 0
    return out.to(device), segments.to(device)


def _check_ids(ids: Tensor, vocab: int) -> None:
    """A clear error for ids that no embedding stands for: a GPU would end the whole program."""
    wrong = (ids < 0) | (ids >= vocab)
    if bool(wrong.any()):
        row, first = int(wrong.any(dim=1).nonzero()[0]), int(ids[wrong][0])
        raise ValueError(f"prompt {row}: id {first} is outside the vocabulary of {vocab}")


@contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    """A model as it decodes: without dropout and gradients, and afterwards as it was."""
    training = [part for part in parts_of(model) if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():  # not inference_mode: a model may be trained on what it generated
            yield
    finally:
        for part in training:
            part.training = True
