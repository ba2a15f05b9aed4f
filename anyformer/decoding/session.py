"""A session: rows of text that are being continued, with the cache that knows them and the logits of what comes next.

Every strategy is a loop over one: it looks at `logits`, chooses, and `read`s what it chose; beam search also reorders
rows, speculation takes tokens back. So prompts of unequal length, both shapes and every cache are dealt with once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from anyformer.config import LM
from anyformer.decoding.process import History
from anyformer.nn.cache import CacheKind
from anyformer.nn.mask import PADDING, Layout, check, lay_out, real
from anyformer.nn.model import Transformer


class Session:
    """Prompts [b, t], or sources [b, s] to be answered, read and ready to go on. Use within `evaluating(model)`.

    `copies` rows of each prompt stand side by side; `room` is for how many tokens more there is place, `slack` how many
    of them can be taken back at once. `chunk` tokens of a prompt are read at a time.
    """

    def __init__(
        self,
        model: Transformer,
        ids: Tensor,
        room: int,
        *,
        segments: Tensor | None = None,
        cache: CacheKind = "auto",
        slack: int = 0,
        copies: int = 1,
        chunk: int | None = None,
    ):
        if not isinstance(model.config.head, LM) or model.decoder is None:
            raise ValueError("decoding needs a decoder with an `lm` head")
        read = model.source or model.target
        assert read is not None
        batch, length = read.measure(ids)
        memory, source = None, None
        if model.encoder is not None:
            start = model.config.special.start
            if start is None:
                raise ValueError("decoding needs `special.start`, the id that the decoder reads first")
            source = _copied(lay_out(batch, length, ids.device, segments=segments), copies)
            memory, segments = _repeated(model.encode(ids, segments=segments), copies), None
            ids = torch.full((batch, 1), start, device=ids.device)
        self.model = model
        self.ids = _repeated(ids, copies)  # all that was read, prompts and answers [rows, n]
        check(*ids.shape, segments=segments)
        segments = None if segments is None else _repeated(segments, copies)
        self.there = torch.ones_like(self.ids, dtype=torch.bool) if segments is None else real(segments)
        self.prompt = self.ids.shape[1]
        if not bool(self.there.any(dim=1).all()):
            empty = int((~self.there.any(dim=1)).nonzero()[0]) // copies
            raise ValueError(f"prompt {empty} is empty: give it at least one token, such as the start of a text")
        self.cache = model.new_cache(len(self.ids), self.prompt + room, kind=cache, slack=slack)
        self.logits = self._prefill(memory, source, segments, chunk or self.prompt)  # of the next token [rows, v]

    def _prefill(self, memory: Tensor | None, source: Layout | None, segments: Tensor | None, chunk: int) -> Tensor:
        last = torch.where(self.there, torch.arange(self.prompt, device=self.ids.device), -1).amax(dim=1)
        kept: Tensor | None = None
        parts = []
        for at in range(0, self.prompt, chunk):
            part = slice(at, at + chunk)
            some = None if segments is None else segments[:, part]
            hidden = self.model.decode(self.ids[:, part], memory, source=source, segments=some, cache=self.cache)
            memory = source = None  # the cache has them now
            parts.append(hidden)
            here = (last >= at) & (last < at + hidden.shape[1])
            mine = hidden.gather(
                1, (last - at).clamp(0, hidden.shape[1] - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
            )
            kept = mine if kept is None else torch.where(here[:, None, None], mine, kept)
        assert kept is not None
        self.hidden = torch.cat(parts, dim=1)  # of the tokens that were read last [rows, n, d]
        return self._head(kept)[:, -1]

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.apply_head(hidden, Layout(self.cache.following[:, None].expand(hidden.shape[:2])))

    def read(self, new: Tensor, there: Tensor | None = None) -> Tensor:
        """Reads [rows, n] more tokens, those that are `there`; the logits after each of them [rows, n, v]."""
        segments = None
        if there is not None:
            segments = torch.where(there, self.cache.segment[:, None], PADDING)
        self.hidden = self.model.decode(new, segments=segments, cache=self.cache)
        self.ids = torch.cat((self.ids, new), dim=1)
        self.there = torch.cat((self.there, torch.ones_like(new, dtype=torch.bool) if there is None else there), dim=1)
        logits = self._head(self.hidden)
        self.logits = logits[:, -1]
        return logits

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on from what row `rows[i]` was."""
        self.cache.reorder(rows)
        self.ids, self.there = self.ids[rows], self.there[rows]
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
