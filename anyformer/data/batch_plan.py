"""Plan which examples each batch of an epoch holds: padded or packed rows.

A plan is a function of lengths, seed and epoch alone. So the order is the same for any number of workers or processes,
and resuming needs no replay.
"""

import math
from collections.abc import Generator, Iterator
from itertools import pairwise

import numpy as np

MIN_BUCKET = 16  # the shortest rounded length
MAX_PACKED_TOGETHER = 2**16  # examples whose rows are packed in one pass
# Packing opens this fraction of the rows still needed at a time, or that of all rows if it is more.
OPEN_OF_REMAINING, OPEN_OF_ALL = 4, 12  # denominators

Row = tuple[int, ...]  # the numbers of the examples in one row: one if padded, several if packed
Plan = list[list[Row]]  # rows of each batch
PlanSteps = Generator[float, None, Plan]
"""Makes a plan step by step, and yields the fraction that is done."""


def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers below `count` in the order of an epoch."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def round_lengths(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Round lengths up to a power of two, or to 3/4 of one, at least `MIN_BUCKET`, and to at most `longest`."""
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, MIN_BUCKET))).astype(np.int64)
    rounded = np.where((lengths <= power // 4 * 3) & (power > MIN_BUCKET), power // 4 * 3, power)
    return np.minimum(rounded, longest)


def plan_padded(sizes: np.ndarray, tokens: int, pool: int, seed: int, epoch: int) -> PlanSteps:
    """Plan batches of at most `tokens` slots on each side; `sizes` [n, sides] are the lengths of an example's sides.

    Examples are shuffled, split into pools of about `pool` batches, sorted by length within each pool, and split into
    batches, which are shuffled.
    """
    order, lengths = _shuffled(len(sizes), seed, epoch), sizes.max(axis=1)
    lean = sizes[:, -1] - sizes[:, 0]  # second key: equally long examples with the same shorter side are neighbours
    per_pool = max(1, int(pool * tokens / max(1.0, float(lengths.mean()))))
    batches: Plan = []
    for start in range(0, len(order), per_pool):
        yield start / len(order)
        members = order[start : start + per_pool]
        members = members[np.lexsort((lean[members], lengths[members]))]
        batches += _split(members, lengths, tokens)
    batch_order = np.random.Generator(np.random.PCG64([seed, epoch, 1])).permutation(len(batches))
    return [batches[i] for i in batch_order]


def _split(order: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[list[Row]]:
    """Yield consecutive rows while rows × longest ≤ tokens; lengths ascend, so the newest is the longest."""
    batch: list[Row] = []
    for i in order.tolist():
        if batch and (len(batch) + 1) * int(lengths[i]) > tokens:
            yield batch
            batch = []
        batch.append((i,))
    if batch:
        yield batch


def plan_packed(sizes: np.ndarray, tokens: int, length: int, seed: int, epoch: int) -> PlanSteps:
    """Plan rows of `length` tokens, filled with shuffled examples; `tokens / length` rows per batch.

    `sizes` [n, sides] are the lengths of each side of an example; each side of a row holds at most `length`.
    """
    order, rows = _shuffled(len(sizes), seed, epoch), list[Row]()
    dtype = np.int16 if sizes.max(initial=0) < 2**15 > length else np.int32  # numpy sorts 16-bit integers fastest
    for start in range(0, len(order), MAX_PACKED_TOGETHER):
        chunk, done = order[start : start + MAX_PACKED_TOGETHER], start / len(order)
        row_of = yield from _pack(sizes[chunk].astype(dtype), length, done, len(chunk) / len(order))
        members, ends = chunk[row_of.argsort(kind="stable")].tolist(), np.bincount(row_of).cumsum().tolist()
        rows += [tuple(members[a:b]) for a, b in pairwise([0, *ends])]
    row_order = np.random.Generator(np.random.PCG64([seed, epoch, 1])).permutation(len(rows)).tolist()
    per_batch = max(1, tokens // length)
    return [[rows[i] for i in row_order[start : start + per_batch]] for start in range(0, len(rows), per_batch)]


def _pack(needs: np.ndarray, length: int, done: float, share: float) -> Generator[float, None, np.ndarray]:
    """Return the row of each example; the yielded progress runs from `done` to `done + share`.

    A few rows at a time are open and are filled until nothing fits. In turn, each open row takes the longest example
    that fits on the side where the row has more room, or, if none does, on the tighter side. Long examples come first,
    so short ones remain for the gaps.
    """
    needs = needs[:, : max(1, int(needs.any(axis=0).sum()))]  # drop sides without tokens, which are last
    longest, row_of = needs.max(axis=1), np.empty(len(needs), dtype=np.int64)
    if longest.max(initial=0) > length:
        raise ValueError(f"an example has {longest.max()} tokens, and a row holds {length}")
    # `left`: examples without a row; `names` and `room`: of the open rows; `count`: rows opened so far
    left, names, room, count = longest.argsort(kind="stable"), row_of[:0], needs[:0], 0
    whole = -(-int(needs.sum(axis=0).max(initial=0)) // length)

    def put(rows: np.ndarray, sizes: np.ndarray, rooms: np.ndarray) -> None:
        nonlocal left
        which, where = _match(sizes[left], rooms)
        examples, where = left[which], rows[where]
        fits = (needs[examples] <= room[where]).all(axis=1)
        examples, where = examples[fits], where[fits]
        row_of[examples] = names[where]
        room[where] -= needs[examples]
        left = np.delete(left, which[fits])

    while len(left):
        yield done + share * (1 - len(left) / len(needs))
        least = int(room.min()) if len(room) else 0
        at_once = 3 * least // (4 * max(1, int(longest[left[-1]])))
        if at_once > 1:  # this many of the longest examples fit into every open row
            examples = left[-at_once * len(room) :]
            where = np.arange(len(examples)) % len(room)
            row_of[examples], left = names[where], left[: -len(examples)]
            np.subtract.at(room, where, needs[examples])
            continue
        usable = (room >= needs[left].min(axis=0)).all(axis=1)
        names, room, before = names[usable], room[usable], len(left)
        wider = room.argmax(axis=1)
        for side in range(needs.shape[1]):
            rows = (wider == side).nonzero()[0]
            put(rows, needs[:, side], room[rows, side])
        if len(left) == before:
            put(np.arange(len(room)), longest, room.min(axis=1))
        if len(left) == before:
            remaining = -(-int(needs[left].sum(axis=0).max()) // length)
            new = max(1, min(remaining, max(-(-remaining // OPEN_OF_REMAINING), -(-whole // OPEN_OF_ALL))))
            names, room = np.arange(count, count + new), np.full((new, needs.shape[1]), length, dtype=needs.dtype)
            count += new
    return row_of


def _match(sizes: np.ndarray, rooms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs (size, room): each room gets the largest size that fits and that no wider room takes."""
    by, order = sizes.argsort(kind="stable"), rooms.argsort(kind="stable")
    number = np.arange(len(order))
    most = sizes[by].searchsorted(rooms[order], side="right") - 1 - number
    best = np.minimum.accumulate(most[::-1])[::-1] + number
    fits = best >= 0
    return by[best[fits]], order[fits]


class GradualPlan:
    """A plan that is made a little at a time, between batches."""

    def __init__(self, steps: PlanSteps):
        self._steps = steps
        self._done = -1.0  # fraction
        self._plan: Plan | None = None  # once it is complete

    def advance(self, fraction: float) -> None:
        """Continue until at least this fraction of the plan is made."""
        try:
            while self._plan is None and self._done < fraction:
                self._done = next(self._steps)
        except StopIteration as end:
            self._plan = end.value

    def plan(self) -> Plan:
        """Complete the plan and return it."""
        self.advance(math.inf)
        assert self._plan is not None
        return self._plan
