"""From encoded examples to batches: which rows stand together, and the tensors they become.

A plan says which examples each batch of an epoch holds. It is a function of lengths, seed and epoch alone, so the order
is the same for any number of workers or processes, and resuming needs no replay.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.conventions import IGNORE, PADDING, next_power_of_two

POOL = 2**16  # examples that are packed together, at most
OF_LEFT, OF_ALL = 4, 12  # packing fills a fourth of the rows that are left to fill at a time, or a twelfth of all

Ids = Sequence[int]


class Example(NamedTuple):
    """One example in ids: what the model reads, and what it must say at each place, or of all of them."""

    ids: Ids
    labels: Sequence[Any]  # as many ids; or what is asked of the row, in numbers
    source: Ids | None = None  # what an encoder reads
    types: Ids | None = None  # as long as ids, where the model has token types and there are two texts
    pair: Ids | None = None  # another text that is read apart, in a row of its own
    marks: Ids | None = (
        None  # as long as ids, where some tokens are seen by all of the text (see `attention/layout.py`)
    )
    spelled: np.ndarray | None = None  # [ids, longest], the words of the ids in bytes + 1, where the model reads them

    @property
    def length(self) -> int:
        """What a row must hold: the longer side of a pair."""
        return max(len(self.ids), len(self.source or ()), len(self.pair or ()))


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
        return _other(self.labels, IGNORE)

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
    return ids.numel() if segments is None else _other(segments, PADDING)


def _other(x: Tensor, than: int) -> int:
    """How many are; on the host by numpy, which starts at once."""
    return int(np.count_nonzero(x.numpy() != than) if x.device.type == "cpu" else (x != than).sum())


def move(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; to a GPU by way of memory that it reads itself, so that nobody waits for the copy."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


# -- plans: rows of examples, and batches of rows --------------------------------------------------------------------

Row = tuple[int, ...]  # the examples in one row: one if padded, several if packed
Plan = list[list[Row]]
Planning = Generator[float, None, Plan]
"""A plan in the making, which says time and again how much of it is done: it may be made bit by bit."""


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def plan_padded(sizes: np.ndarray, tokens: int, pool: int, seed: int, epoch: int) -> Planning:
    """Batches of at most `tokens` slots on each side; `sizes` [n, sides] are the lengths of each side of an example.

    Examples are shuffled, cut into pools of about `pool` batches, sorted by length within a pool, cut into batches, and
    the batches shuffled.
    """
    order, lengths = shuffled(len(sizes), seed, epoch), sizes.max(axis=1)
    lean = sizes[:, -1] - sizes[:, 0]  # among equally long ones, those with the same shorter side stand together
    per_pool = max(1, int(pool * tokens / max(1.0, float(lengths.mean()))))
    batches: Plan = []
    for start in range(0, len(order), per_pool):
        yield start / len(order)
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


def plan_packed(sizes: np.ndarray, tokens: int, length: int, seed: int, epoch: int) -> Planning:
    """Rows of `length` filled from shuffled examples, `tokens / length` rows a batch.

    `sizes` [n, sides] are the lengths of each side of an example; every side of a row must hold its share.
    """
    order, rows = shuffled(len(sizes), seed, epoch), list[Row]()
    dtype = np.int16 if sizes.max(initial=0) < 2**15 > length else np.int32  # numpy sorts 16 bits the fastest
    for start in range(0, len(order), POOL):
        some, done = order[start : start + POOL], start / len(order)
        row_of = yield from _packed(sizes[some].astype(dtype), length, done, len(some) / len(order))
        members, ends = some[row_of.argsort(kind="stable")].tolist(), np.bincount(row_of).cumsum().tolist()
        rows += [tuple(members[a:b]) for a, b in pairwise([0, *ends])]
    mixed = np.random.Generator(np.random.PCG64([seed, epoch, 1])).permutation(len(rows)).tolist()
    per_batch = max(1, tokens // length)
    return [[rows[i] for i in mixed[start : start + per_batch]] for start in range(0, len(mixed), per_batch)]


def _packed(needs: np.ndarray, length: int, done: float, share: float) -> Generator[float, None, np.ndarray]:
    """The row of each example; how much is done goes from `done` on by `share`.

    Some rows at a time are filled until nothing fits. In turn each takes another example, the longest that fits on the
    side where the row has more room, or on the tighter side if nothing does: long ones come first, and short ones are
    there to the end for what is left of a row.
    """
    needs = needs[:, : max(1, int(needs.any(axis=0).sum()))]  # a side without tokens is the last
    longest, row_of = needs.max(axis=1), np.empty(len(needs), dtype=np.int64)
    if longest.max(initial=0) > length:
        raise ValueError(f"an example of {longest.max()} tokens, and a row holds {length}")
    left, names, room, count = longest.argsort(kind="stable"), row_of[:0], needs[:0], 0  # names and room of open rows
    whole = -(-int(needs.sum(axis=0).max(initial=0)) // length)

    def put(rows: np.ndarray, sizes: np.ndarray, rooms: np.ndarray) -> None:
        nonlocal left
        which, where = _matched(sizes[left], rooms)
        who, where = left[which], rows[where]
        fits = (needs[who] <= room[where]).all(axis=1)
        who, where = who[fits], where[fits]
        row_of[who] = names[where]
        room[where] -= needs[who]
        left = np.delete(left, which[fits])

    while len(left):
        yield done + share * (1 - len(left) / len(needs))
        least = int(room.min()) if len(room) else 0
        at_once = 3 * least // (4 * max(1, int(longest[left[-1]])))
        if at_once > 1:  # as many of the longest fit into every row
            some = left[-at_once * len(room) :]
            where = np.arange(len(some)) % len(room)
            row_of[some], left = names[where], left[: -len(some)]
            np.subtract.at(room, where, needs[some])
            continue
        alive = (room >= needs[left].min(axis=0)).all(axis=1)
        names, room, before = names[alive], room[alive], len(left)
        wider = room.argmax(axis=1)
        for side in range(needs.shape[1]):
            rows = (wider == side).nonzero()[0]
            put(rows, needs[:, side], room[rows, side])
        if len(left) == before:
            put(np.arange(len(room)), longest, room.min(axis=1))
        if len(left) == before:
            rest = -(-int(needs[left].sum(axis=0).max()) // length)
            new = max(1, min(rest, max(-(-rest // OF_LEFT), -(-whole // OF_ALL))))
            names, room = np.arange(count, count + new), np.full((new, needs.shape[1]), length, dtype=needs.dtype)
            count += new
    return row_of


def _matched(sizes: np.ndarray, rooms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What goes where: into each room the largest that fits, and that no wider room takes."""
    by, order = sizes.argsort(kind="stable"), rooms.argsort(kind="stable")
    number = np.arange(len(order))
    most = sizes[by].searchsorted(rooms[order], side="right") - 1 - number
    best = np.minimum.accumulate(most[::-1])[::-1] + number
    fits = best >= 0
    return by[best[fits]], order[fits]


class Draft:
    """A plan that is made bit by bit."""

    def __init__(self, planning: Planning):
        self._planning = planning
        self._done = -1.0  # a share
        self._plan: Plan | None = None  # when it is made

    def go_on(self, share: float) -> None:
        """Until that much of it is made."""
        try:
            while self._plan is None and self._done < share:
                self._done = next(self._planning)
        except StopIteration as end:
            self._plan = end.value

    def plan(self) -> Plan:
        self.go_on(math.inf)
        assert self._plan is not None
        return self._plan


# -- collating -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences end to end, and the length of each."""

    values: np.ndarray  # [all of them], or [all, n]
    sizes: np.ndarray

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each begins, and the last ends."""
        return np.concatenate(([0], self.sizes.cumsum()))

    def part(self, i: int) -> np.ndarray:
        return self.values[self.starts[i] : self.starts[i + 1]]

    def take(self, who: np.ndarray) -> "Ragged":
        """Some of them, in any order."""
        sizes = self.sizes[who]
        moved = self.starts[who] - (sizes.cumsum() - sizes)
        return Ragged(self.values.take(np.arange(sizes.sum()) + np.repeat(moved, sizes), axis=0), sizes)

    def framed(self, before: Ids, after: Ids) -> "Ragged":
        """Each with the same around it."""
        sizes = self.sizes + len(before) + len(after)
        ends = sizes.cumsum()
        at = [*(ends - sizes + i for i in range(len(before))), *(ends - i for i in range(len(after), 0, -1))]
        return Ragged(inserted(self.values, np.array(at, dtype=np.int64).T, np.array([*before, *after])), sizes)


def inserted(values: np.ndarray, at: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Values with others among them, which then stand at these places."""
    out, within = np.empty(len(values) + at.size, dtype=values.dtype), np.ones(len(values) + at.size, dtype=np.bool_)
    out[at], within[at] = others, False
    out[within] = values
    return out


def joined(some: Sequence[Any]) -> Ragged:
    sizes = np.array([len(x) for x in some], dtype=np.int64)
    if some and isinstance(some[0], np.ndarray):
        return Ragged(np.concatenate(some), sizes)
    dtype = np.float32 if some and some[0] and isinstance(some[0][0], float) else np.int32
    return Ragged(np.fromiter(chain.from_iterable(some), dtype, int(sizes.sum())), sizes)


class ExampleTable(Sequence[Example]):
    """Examples of one kind, each part of them end to end: a batch is cut out of it in one go, where a token at a time
    would take longer than a GPU takes for it."""

    def __init__(self, ids: Ragged, labels: Ragged, **others: Ragged):
        self.columns = {"ids": ids, "labels": labels, **others}  # by the names of a piece's fields

    @classmethod
    def of(cls, pieces: Sequence[Example]) -> "ExampleTable":
        if isinstance(pieces, ExampleTable):
            return pieces
        first = pieces[0] if pieces else Example((), ())
        there = [name for name in Example._fields if getattr(first, name) is not None]
        return cls(**{name: joined([getattr(piece, name) for piece in pieces]) for name in there})

    def __len__(self) -> int:
        return len(self.columns["ids"].sizes)

    def __getitem__(self, i: Any) -> Any:
        found = {name: parts.part(range(len(self))[i]) for name, parts in self.columns.items()}
        own: dict[str, Any] = {name: x.tolist() if x.ndim == 1 else x for name, x in found.items()}
        return Example(**own)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of what is read, and of what else is: a source, or a text apart; [n, 2]."""
        both = [self.columns[name].sizes for name in ("ids", "source", "pair") if name in self.columns]
        return np.stack([both[0], both[1] if len(both) > 1 else np.zeros_like(both[0])], axis=1)

    def take(self, who: np.ndarray) -> "ExampleTable":
        return ExampleTable(**{name: parts.take(who) for name, parts in self.columns.items()})


def collate(
    rows: Sequence[Row], pieces: Sequence[Example], pad: int, source_pad: int, length: int | None = None
) -> Batch:
    """The tensors of some rows of examples."""
    return lay(rows, ExampleTable.of(pieces).take(np.array(list(chain.from_iterable(rows)))), pad, source_pad, length)


def lay(
    rows: Sequence[Row], shelf: ExampleTable, pad: int, source_pad: int, length: int | None = None, documents: int = 0
) -> Batch:
    """The tensors of rows whose examples stand on a shelf, one after the other; `length` fixes the width, else the
    longest row decides. Rows may be empty, but for the first. `documents` are at most expected: a batch says that
    number, unless it has more."""
    columns, examples = shelf.columns, tuple(chain.from_iterable(rows))
    counts = np.array([len(row) for row in rows], dtype=np.int64)

    def fill(name: str, filler: int) -> Tensor:
        return _fill(columns[name], counts, filler, length)

    labels = fill("labels", IGNORE)
    documents = max(documents, next_power_of_two(len(examples)))
    if "pair" in columns:
        apart = _in_turns(columns["ids"], columns["pair"])
        ones = np.ones(2 * len(examples), dtype=np.int64)
        ids, segments = _fill(apart, ones, pad, length), _segments(apart.sizes, ones, length)
        return Batch(ids, labels, segments, examples=examples)
    ids, segments = fill("ids", pad), _segments(columns["ids"].sizes, counts, length)
    if "source" not in columns:
        more: dict[str, Any] = {name: fill(name, 0) for name in ("types", "marks", "spelled") if name in columns}
        return Batch(ids, labels, segments, examples=examples, documents=documents, **more)
    source, source_segments = fill("source", source_pad), _segments(columns["source"].sizes, counts, length)
    if segments is None or source_segments is None:  # packed or padded on one side: say so on both
        segments = torch.zeros_like(ids) if segments is None else segments
        source_segments = torch.zeros_like(source) if source_segments is None else source_segments
    return Batch(ids, labels, segments, source, source_segments, examples, documents=documents)


def _in_turns(one: Ragged, other: Ragged) -> Ragged:
    """A sequence of one, then one of the other, and so on."""
    both = Ragged(np.concatenate((one.values, other.values)), np.concatenate((one.sizes, other.sizes)))
    return both.take(np.arange(len(both.sizes)).reshape(2, -1).T.ravel())


def _fill(parts: Ragged, counts: np.ndarray, filler: int, length: int | None) -> Tensor:
    """Sequences, so many in each row, as [b, t]."""
    values, dtype = parts.values, np.float32 if parts.values.dtype.kind == "f" else np.int64
    if _full(parts.sizes, counts, length):
        return torch.from_numpy(values.reshape(len(counts), parts.sizes[0], *values.shape[1:]).astype(dtype))
    there = _there(parts.sizes, counts, length)
    out = np.full((*there.shape, *values.shape[1:]), filler, dtype=dtype)
    out[there] = values
    return torch.from_numpy(out)


def _segments(sizes: np.ndarray, counts: np.ndarray, length: int | None) -> Tensor | None:
    """Which sequence of its row a token is of [b, t]; None if every row is one full sequence of no fixed length."""
    if _full(sizes, counts, length):
        return None
    there = _there(sizes, counts, length)
    segments = np.full(there.shape, PADDING, dtype=np.int64)
    segments[there] = np.repeat(np.arange(len(sizes)) - np.repeat(counts.cumsum() - counts, counts), sizes)
    return torch.from_numpy(segments)


def _full(sizes: np.ndarray, counts: np.ndarray, length: int | None) -> bool:
    return length is None and bool((counts == 1).all() and (sizes == sizes[0]).all())


def _there(sizes: np.ndarray, counts: np.ndarray, length: int | None) -> np.ndarray:
    """Where tokens stand [b, t]: rows are filled from the left, so they stand there as they come."""
    totals = sizes.cumsum()[counts.cumsum() - 1]
    totals[1:] -= totals[:-1].copy()
    return np.arange(length or totals.max(), dtype=np.int32) < totals.astype(np.int32)[:, None]
