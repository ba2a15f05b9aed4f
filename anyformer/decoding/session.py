"""A session: rows of text that are being continued, with the cache that knows them and the logits of what comes next.

Every strategy is a loop over one: it looks at `logits`, chooses, and `read`s what it chose; beam search also reorders
rows, speculation takes tokens back. So prompts of unequal length, both shapes and every cache are dealt with once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from anyformer.config import LM, ConfigError, Fault
from anyformer.decoding.process import History
from anyformer.decoding.reuse import Begun, Reuse
from anyformer.decoding.step import Stepper, logits
from anyformer.nn.cache import CacheKind
from anyformer.nn.inputs import TokenInput
from anyformer.nn.mask import PADDING, Layout, check, lay_out, real
from anyformer.nn.model import Transformer


class Session:
    """Prompts [b, t], or sources [b, s] to be answered, read and ready to go on. Use within `evaluating(model)`.

    `copies` rows of each prompt stand side by side; `room` is for how many tokens more there is place, `slack` how many
    of them can be taken back at once. `chunk` tokens of a prompt are read at a time. `compile` pays where many tokens
    are read one by one; on a GPU these are replayed from a graph in any case, so that `hidden` and `logits` are written
    over at the next `read`. With `reuse`, what was read before of a prompt is not read again, and stands first. Tokens
    of a prompt that are marked as seen [b, t] are seen by all of it, so it is read at once, and anew.
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
        memory, source = None, None
        if model.encoder is not None:
            start = model.config.special.start
            if start is None:
                raise ValueError("decoding needs `special.start`, the id that the decoder reads first")
            source = _copied(lay_out(batch, length, ids.device, segments=segments), copies)
            memory, segments = _repeated(model.encode(ids, segments=segments), copies), None
            ids = torch.full((batch, 1), start, device=ids.device)
        self.model = model
        if marks is not None:
            if model.encoder is not None:
                raise ValueError("only a decoder without an encoder reads marked prompts: leave `marks` out")
            what = "is not for prompts that see all of themselves: these are read at once"
            if idle := [name for name, given in (("chunk", chunk), ("reuse", reuse)) if given is not None]:
                raise ConfigError(Fault(name, what) for name in idle)
            cache = "static" if cache == "auto" else cache  # what is seen by all is seen from beyond any window
        check(*ids.shape, segments=segments, marks=marks)
        ids, segments = _repeated(ids, copies), None if segments is None else _repeated(segments, copies)
        marks = None if marks is None else _repeated(marks, copies)
        self.given = ids  # the prompts as they came
        begun: list[Begun] = []
        if reuse is not None:
            if model.encoder is not None:
                raise ValueError("only a decoder without an encoder has prompts to reuse: leave `reuse` out")
            prompts = _rows(ids, torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments))
            like = model.new_cache(0, ids.shape[1] + room, kind=cache, slack=slack)
            begun = reuse.find(model, like, prompts)
            ids, segments = _begun(prompts, begun, ids.device)
        self.prompt = self.length = ids.shape[1]
        self._ids = ids.new_zeros(len(ids), self.prompt + room)
        self._there = torch.zeros_like(self._ids, dtype=torch.bool)
        self._ids[:, : self.prompt] = ids
        self._there[:, : self.prompt] = True if segments is None else real(segments)
        if not bool(self.there.any(dim=1).all()):
            empty = int((~self.there.any(dim=1)).nonzero()[0]) // copies
            raise ValueError(f"prompt {empty} is empty: give it at least one token, such as the start of a text")
        self.cache = model.new_cache(len(ids), self.prompt + room, kind=cache, slack=slack)
        known = max((one.length for one in begun), default=0)
        for row, one in enumerate(begun):
            one.put(self.cache, row)
        self.cache.skip(known)
        self.logits = self._prefill(
            memory, source, segments, marks, known, chunk or self.prompt
        )  # of the next token [rows, v]
        self.bound = int(self.cache.following.max())  # all positions are below it
        self._step = Stepper(model, self.cache, compile=compile)

    @property
    def ids(self) -> Tensor:
        """All that was read, prompts and answers [rows, n]."""
        return self._ids[:, : self.length]

    @property
    def there(self) -> Tensor:
        """Which of them are tokens, bool [rows, n]."""
        return self._there[:, : self.length]

    def _prefill(
        self,
        memory: Tensor | None,
        source: Layout | None,
        segments: Tensor | None,
        marks: Tensor | None,
        begin: int,
        chunk: int,
    ) -> Tensor:
        last = torch.where(self.there, torch.arange(self.prompt, device=self.ids.device), -1).amax(dim=1)
        kept: Tensor | None = None
        parts = []
        for at in range(begin, self.prompt, chunk):
            part = slice(at, at + chunk)
            some = None if segments is None else segments[:, part]
            hidden = self.model.decode(
                self.ids[:, part], memory, source=source, segments=some, marks=marks, cache=self.cache
            )
            memory = source = None  # the cache has them now
            parts.append(hidden)
            here = (last >= at) & (last < at + hidden.shape[1])
            mine = hidden.gather(
                1, (last - at).clamp(0, hidden.shape[1] - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
            )
            kept = mine if kept is None else torch.where(here[:, None, None], mine, kept)
        assert kept is not None
        self.hidden = torch.cat(parts, dim=1)  # of the tokens that were read last [rows, n, d]
        return logits(self.model, self.cache, kept)[:, -1]

    def read(self, new: Tensor, there: Tensor | None = None) -> Tensor:
        """Reads [rows, n] more tokens, those that are `there`; the logits after each of them [rows, n, v]."""
        after = self.length + new.shape[1]
        self.bound += new.shape[1]
        self.hidden, found = self._step(new, there, self.bound)
        self._ids[:, self.length : after] = new
        self._there[:, self.length : after] = True if there is None else there
        self.length, self.logits = after, found[:, -1]
        return found

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
            self._ids, self._there = self._ids.gather(1, order), self._there.gather(1, order)
            self.length = self.cache.taken

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from what row `rows[i]` was."""
        self.cache.reorder(rows)
        self._ids, self._there = self._ids[rows], self._there[rows]
        self.hidden, self.logits = self.hidden[rows], self.logits[rows]

    @property
    def answers(self) -> Tensor:
        """What was read after the prompts, [rows, new]."""
        return self.ids[:, self.prompt :]

    @property
    def history(self) -> History:
        """What processors look at."""
        new = torch.arange(self.ids.shape[1], device=self.ids.device) >= self.prompt
        return History(self.ids, self.there, new.expand_as(self.there))

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


def _repeated(x: Tensor, copies: int) -> Tensor:
    return x if copies == 1 else x.repeat_interleave(copies, dim=0)


def _copied(layout: Layout, copies: int) -> Layout:
    """A layout with each row several times over; facts that all rows share stay as they are."""
    if copies == 1:
        return layout
    positions, segments, marks = (
        x if x is None or x.shape[0] == 1 else _repeated(x, copies)
        for x in (layout.positions, layout.segments, layout.marks)
    )
    assert positions is not None
    return layout._replace(positions=positions, segments=segments, marks=marks)


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
