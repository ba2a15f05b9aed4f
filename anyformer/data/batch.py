"""From encoded examples to batches: which rows stand together, and the tensors they become.

A plan says which examples each batch of an epoch holds. It is a function of lengths, seed and epoch alone, so the order
is the same for any number of workers or processes, and resuming needs no replay.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100  # a label that asks for nothing
PADDING = -1  # the segment of padding
OPEN_ROWS = 16  # that packing looks at to place an example
QUEUES = 32  # of examples that are packed side by side, at most
QUEUE = 150  # rows that one of them fills, at least: its last is not full

Ids = Sequence[int]


class Piece(NamedTuple):
    """One example in ids: what the model reads, and what it must say at each place, or of all of them."""

    ids: Ids
    labels: Sequence[Any]  # as many ids; or what is asked of the row, in numbers
    source: Ids | None = None  # what an encoder reads
    types: Ids | None = None  # as long as ids, where the model has token types and there are two texts
    pair: Ids | None = None  # another text that is read apart, in a row of its own
    marks: Ids | None = None  # as long as ids, where some tokens are seen by all of the text (see `nn/mask.py`)
    spelled: np.ndarray | None = None  # [ids, longest], the words of the ids in bytes + 1, where the model reads them

    @property
    def length(self) -> int:
        """What a row must hold: the longer side of a pair."""
        return max(len(self.ids), len(self.source or ()), len(self.pair or ()))

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of what is read, and of what else is: a source, or a text apart."""
        return len(self.ids), len(self.source or self.pair or ())


class Batch(NamedTuple):
    """What a model is trained on in one forward pass."""

    ids: Tensor  # [b, t]; [2b, t] of pairs that are read apart, one text below the other
    labels: Tensor  # [b, t], IGNORE where nothing is asked; or [b, n] of whole rows
    segments: Tensor | None  # [b, t], PADDING where there is no token; None: full rows
    source: Tensor | None = None  # [b, s]
    source_segments: Tensor | None = None
    examples: tuple[int, ...] = ()  # their numbers: the identity of the batch
    follows: bool = False  # every row goes on where it ended in the batch before
    types: Tensor | None = None  # [b, t]
    marks: Tensor | None = None  # [b, t]
    spelled: Tensor | None = None  # [b, t, longest]
    documents: int = 0  # at most so many in all rows, where they are packed

    def to(self, device: torch.device) -> "Batch":
        moved: dict[str, Any] = {name: move(x, device) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**moved)

    @property
    def asked(self) -> int:
        """How many labels ask for something."""
        return int((self.labels != IGNORE).sum())

    @property
    def tokens(self) -> int:
        """Real tokens, of both sides."""
        return self.own_tokens + (0 if self.source is None else _real(self.source, self.source_segments))

    @property
    def own_tokens(self) -> int:
        """Real tokens beside a source's."""
        return _real(self.ids, self.segments)

    @property
    def slots(self) -> int:
        """Places for tokens, padding included."""
        return self.ids.numel() + (0 if self.source is None else self.source.numel())


def _real(ids: Tensor, segments: Tensor | None) -> int:
    return ids.numel() if segments is None else int((segments != PADDING).sum())


def power(count: int) -> int:
    """Of two, and no less: few different numbers, as each is compiled for."""
    return 1 << (count - 1).bit_length()


def move(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; to a GPU by way of memory that it reads itself, so that nobody waits for the copy."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


# -- plans: rows of examples, and batches of rows --------------------------------------------------------------------

Row = tuple[int, ...]  # the examples in one row: one if padded, several if packed


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def plan_padded(sizes: np.ndarray, tokens: int, pool: int, seed: int, epoch: int) -> list[list[Row]]:
    """Batches of at most `tokens` slots on each side; `sizes` [n, sides] are the lengths of each side of an example.

    Examples are shuffled, cut into pools of about `pool` batches, sorted by length within a pool, cut into batches, and
    the batches shuffled.
    """
    order, lengths = shuffled(len(sizes), seed, epoch), sizes.max(axis=1)
    lean = sizes[:, -1] - sizes[:, 0]  # among equally long ones, those with the same shorter side stand together
    per_pool = max(1, int(pool * tokens / max(1.0, float(lengths.mean()))))
    batches: list[list[Row]] = []
    for start in range(0, len(order), per_pool):
        part = order[start : start + per_pool]
        part = part[np.lexsort((lean[part], lengths[part]))]
        batches += _cut(part, lengths, tokens)
    mixed = np.random.Generator(np.random.PCG64([seed, epoch, 1])).permutation(len(batches))
    return [batches[i] for i in mixed]


def _cut(order: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[list[Row]]:
    """Consecutive rows while rows times the longest fit; sorted upwards, so the newest is the longest."""
    batch: list[Row] = []
    for i in order.tolist():
        if batch and (len(batch) + 1) * int(lengths[i]) > tokens:
            yield batch
            batch = []
        batch.append((i,))
    if batch:
        yield batch


def plan_packed(sizes: np.ndarray, tokens: int, length: int, seed: int, epoch: int) -> list[list[Row]]:
    """Rows of `length` filled best-fit from shuffled examples, `tokens / length` rows a batch.

    `sizes` [n, sides] are the lengths of each side of an example; every side of a row must hold its share. Examples
    stand in several queues that are packed side by side, each into open rows of its own: an epoch is planned in less
    time than a GPU trains on it.
    """
    order = shuffled(len(sizes), seed, epoch)
    queues = int(np.clip(sizes.sum(axis=0).max() // (length * QUEUE), 1, QUEUES))
    which = np.arange(queues)
    left = np.full((queues, OPEN_ROWS, sizes.shape[1]), -1)  # the room of the open rows, on each side
    open_rows = np.zeros((queues, OPEN_ROWS), dtype=np.int64)  # their numbers
    row_of, count = np.empty(len(order), dtype=np.int64), 0
    for start in range(0, len(order), queues):
        who = order[start : start + queues]
        need, here = sizes[who], which[: len(who)]
        room = (left[: len(who)] - need[:, None]).min(axis=2)
        n = np.where(room >= 0, room, length).argmin(axis=1)  # the tightest that fits
        full = (room[here, n] < 0).nonzero()[0]
        if len(full):  # none does: the fullest gives way to a new one
            n[full] = left[full].min(axis=2).argmin(axis=1)
            left[full, n[full]] = length
            open_rows[full, n[full]] = np.arange(count, count + len(full))
            count += len(full)
        left[here, n] -= need
        row_of[start : start + len(who)] = open_rows[here, n]
    members, ends = order[row_of.argsort(kind="stable")].tolist(), np.bincount(row_of).cumsum().tolist()
    packed = [tuple(members[a:b]) for a, b in pairwise([0, *ends])]
    per_batch = max(1, tokens // length)
    return [packed[start : start + per_batch] for start in range(0, len(packed), per_batch)]


# -- collating -------------------------------------------------------------------------------------------------------


def collate(
    rows: Sequence[Row],
    pieces: Sequence[Piece] | Mapping[int, Piece],
    pad: int,
    source_pad: int,
    length: int | None = None,
    documents: int = 0,
) -> Batch:
    """The tensors of some rows of examples; `length` fixes the width, else the longest row decides. Rows may be empty,
    but for the first. `documents` are at most expected: a batch says that number, unless it has more."""
    members = [[pieces[i] for i in row] for row in rows]
    labels, _ = _fill([[p.labels for p in row] for row in members], IGNORE, length)
    examples = tuple(i for row in rows for i in row)
    documents = max(documents, power(len(examples)))
    first = pieces[rows[0][0]]
    if first.pair is not None:
        ids, segments = _fill([[ids] for row in members for p in row for ids in (p.ids, p.pair or ())], pad, length)
        return Batch(ids, labels, segments, examples=examples)
    ids, segments = _fill([[p.ids for p in row] for row in members], pad, length)
    if first.source is None:
        types = None if first.types is None else _fill([[p.types or () for p in row] for row in members], 0, length)[0]
        marks = None if first.marks is None else _fill([[p.marks or () for p in row] for row in members], 0, length)[0]
        spelled = None if first.spelled is None else _spread(members, ids.shape[1], first.spelled.shape[1])
        more: dict[str, Any] = {"types": types, "marks": marks, "spelled": spelled, "documents": documents}
        return Batch(ids, labels, segments, examples=examples, **more)
    source, source_segments = _fill([[p.source or () for p in row] for row in members], source_pad, length)
    if segments is None or source_segments is None:  # packed or padded on one side: say so on both
        segments = torch.zeros_like(ids) if segments is None else segments
        source_segments = torch.zeros_like(source) if source_segments is None else source_segments
    return Batch(ids, labels, segments, source, source_segments, examples, documents=documents)


def _fill(rows: list[list[Any]], filler: int, length: int | None) -> tuple[Tensor, Tensor | None]:
    """Rows of sequences as [b, t], and their segments unless every row is one full sequence of no fixed length."""
    parts = [ids for row in rows for ids in row]
    sizes, counts = (np.array([len(x) for x in some], dtype=np.int64) for some in (parts, rows))
    row, ends = np.repeat(np.arange(len(rows)), counts), sizes.cumsum()
    totals = np.bincount(row, sizes, len(rows)).astype(np.int64)
    width = length or int(totals.max())
    # a token's place is its number among all tokens, moved by what pads the rows above it
    moved = np.arange(len(rows)) * width - (totals.cumsum() - totals)
    at = np.arange(ends[-1]) + np.repeat(moved[row], sizes)
    segment = np.arange(len(parts)) - np.repeat(counts.cumsum() - counts, counts)
    dtype = np.float32 if parts[0] and isinstance(parts[0][0], float) else np.int64
    out = np.full(len(rows) * width, filler, dtype=dtype)
    segments = np.full(len(rows) * width, PADDING, dtype=np.int64)
    out[at] = np.fromiter(chain.from_iterable(parts), dtype, int(ends[-1]))
    segments[at] = np.repeat(segment, sizes)
    filled, apart = (torch.from_numpy(x.reshape(len(rows), width)) for x in (out, segments))
    return filled, apart if length is not None or segments.any() else None


def _spread(rows: list[list[Piece]], width: int, longest: int) -> Tensor:
    """The bytes of words as [b, t, longest], 0 where there is no token."""
    whole = [[piece.spelled for piece in row if piece.spelled is not None] for row in rows]
    out = np.zeros((len(rows), width, longest), dtype=np.int64)
    for r, row in enumerate(whole):
        out[r, : sum(map(len, row))] = np.concatenate(row or [out[:0, 0]])
    return torch.from_numpy(out)
