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

from anyformer.config import LM, ConfigError, Fault
from anyformer.decoding import place as places
from anyformer.decoding.place import Place, find_place, key_of, leave_place
from anyformer.decoding.process import History
from anyformer.decoding.reuse import Begun, Reuse
from anyformer.decoding.step import compiled, logits, step
from anyformer.nn.cache import Cache, CacheKind
from anyformer.nn.inputs import TokenInput
from anyformer.nn.mask import PADDING, Layout, check, lay_out, real
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
        memory, source, facts = None, None, None
        if model.encoder is not None:
            start = model.config.special.start
            if start is None:
                raise ValueError("decoding needs `special.start`, the id that the decoder reads first")
            source, facts = lay_out(batch, length, ids.device, segments=segments), (length, segments is None)
            memory, segments = model.encode(ids, segments=segments), None
            ids = torch.full((batch, 1), start, device=ids.device)
        self.model, self.compile, self._copies = model, compile, copies
        if marks is not None:
            if model.encoder is not None:
                raise ValueError("only a decoder without an encoder reads marked prompts: leave `marks` out")
            what = "is not for prompts that see all of themselves: these are read at once"
            if idle := [name for name, given in (("chunk", chunk), ("reuse", reuse)) if given is not None]:
                raise ConfigError(Fault(name, what) for name in idle)
            cache = "static" if cache == "auto" else cache  # what is seen by all is seen from beyond any window
        check(*ids.shape, segments=segments, marks=marks)
        self.given = ids  # the prompts as they came
        begun: list[Begun] = []
        if reuse is not None:
            if model.encoder is not None:
                raise ValueError("only a decoder without an encoder has prompts to reuse: leave `reuse` out")
            prompts = _rows(ids, torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments))
            like = model.new_cache(0, ids.shape[1] + room, kind=cache, slack=slack)
            begun = reuse.find(model, like, prompts)
            ids, segments = _begun(prompts, begun, ids.device)
        there = torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments)
        if (segments is not None or not ids.shape[1]) and not bool(there.any(dim=1).all()):
            empty = int((~there.any(dim=1)).nonzero()[0])
            raise ValueError(f"prompt {empty} is empty: give it at least one token, such as the start of a text")
        self.prompt = self.length = ids.shape[1]
        slots, known = self.prompt + room, max((one.length for one in begun), default=0)
        self._key: Hashable = None
        if marks is None and places.captures(ids.device):
            self._key = key_of(model, len(ids), copies, slots, room, facts, cache, slack, compile)
        place = None if self._key is None else find_place(model, self._key)
        if place is None:
            prompts_cache = model.new_cache(len(ids), slots, kind=cache, slack=slack)
            whole = prompts_cache
            if copies > 1:
                whole = model.new_cache(copies * len(ids), slots, kind=cache, slack=slack)
            place = Place(whole, prompts_cache)
        self.place, self.cache, self._ids, self._there = place, place.cache, place.ids, place.there
        for row, one in enumerate(begun):
            one.put(place.prompts, row)
        place.prompts.skip(known)
        hidden, found = _prefill(
            model, place.prompts, ids, there, memory, source, segments, marks, known, chunk or self.prompt
        )
        if copies > 1:  # prompts are read once
            place.cache.fill(place.prompts, copies)
            place.prompts = place.prompts if self._key is not None else place.cache
        self.hidden = _repeated(hidden, copies)  # of the tokens that were read last [rows, n, d]
        self.logits = _repeated(found, copies)  # of the next token [rows, v]
        self._ids[:, : self.prompt], self._there[:, : self.prompt] = _repeated(ids, copies), _repeated(there, copies)
        plain = segments is None and marks is None
        self.bound = self.prompt if plain else int(self.cache.following.max())  # all positions are below it
        self._limit = min((limit for limit, _ in model.decoder.ends), default=None)
        self._whole = False

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
        at = self.cache.length[None].clone()
        _, found = self._step(new, there)
        self._ids.index_copy_(1, at, new)
        self._there.index_copy_(1, at, there)
        return found[:, -1]

    def _step(self, new: Tensor, there: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self.compile:
            return step(self.model, self.cache, new, there, bound=0)  # there is no end, or it is far
        found: tuple[Tensor, Tensor] = compiled(step)(self.model, self.cache, new, there)
        return found

    def _near_the_end(self, more: int = 0) -> bool:
        """Where positions may end the model itself has to look."""
        return self._limit is not None and self.bound + more > self._limit

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
        self.cache.reorder(rows, within=self._copies)
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


def _prefill(
    model: Transformer,
    cache: Cache,
    ids: Tensor,
    there: Tensor,
    memory: Tensor | None,
    source: Layout | None,
    segments: Tensor | None,
    marks: Tensor | None,
    begin: int,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Reads prompts: the hidden states of what was read [b, n, d], and the logits of what follows each [b, v]."""
    last = torch.where(there, torch.arange(ids.shape[1], device=ids.device), -1).amax(dim=1)
    kept: Tensor | None = None
    parts = []
    for at in range(begin, ids.shape[1], chunk):
        part = slice(at, at + chunk)
        some = None if segments is None else segments[:, part]
        hidden = model.decode(ids[:, part], memory, source=source, segments=some, marks=marks, cache=cache)
        memory = source = None  # the cache has them now
        parts.append(hidden)
        here = (last >= at) & (last < at + hidden.shape[1])
        mine = hidden.gather(1, (last - at).clamp(0, hidden.shape[1] - 1)[:, None, None].expand(-1, 1, hidden.shape[2]))
        kept = mine if kept is None else torch.where(here[:, None, None], mine, kept)
    assert kept is not None
    return torch.cat(parts, dim=1), logits(model, cache, kept)[:, -1]


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


def _repeated(x: Tensor, copies: int) -> Tensor:
    return x if copies == 1 else x.repeat_interleave(copies, dim=0)


@contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    """A model as it decodes: without dropout and gradients, and afterwards as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: a model may be trained on what it generated
            yield
    finally:
        model.train(training)
