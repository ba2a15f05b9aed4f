"""Requests that decode one step ahead of the host, as arrays: few operations of a step are done row by row."""

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anyformer.generation.engine.outbox import Outbox
from anyformer.generation.engine.rows import Row, StepRows
from anyformer.generation.engine.sampler import is_greedy
from anyformer.generation.engine.sequence import Sequence
from anyformer.generation.engine.sequence_pages import SequencePages


class Readback:
    """A choice on its way to the host: ids, and whether their logits were finite, int [2, n]."""

    def __init__(self, both: Tensor):
        self._event: torch.cuda.Event | None = None
        self._host = both
        if both.is_cuda:
            self._host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids, and whether their logits were finite."""
        if self._event is not None:
            self._event.synchronize()
        ids, ok = self._host.numpy()
        return ids, ok != 0


@dataclass(frozen=True)
class UnreadStep:
    """A step whose tokens the host has not read."""

    sequences: list[Sequence]
    chosen: Readback
    left: np.ndarray  # int [n]: tokens of the budgets after this step
    live: np.ndarray  # bool [n]: False if the request has ended meanwhile
    stops: np.ndarray  # int [n, most]: ids that end each row, filled up with -1

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids, which of them are valid, and which are the last of their answers, [n] each."""
        ids, ok = self.chosen.wait()
        ids, ok = ids[: len(self.left)], ok[: len(self.left)]
        ends = self.left == 0
        if self.stops.shape[1]:
            ends = ends | (ids[:, None] == self.stops).any(axis=1)
        return ids, ok, ends & self.live & ok


class DecodeBatch:
    """Requests that decode together. `sequences[i]` is row i of the newest step.

    The tokens that the host has read are stored in the requests by `store`; before it, they are here only. The device
    may be a step ahead: `unread` is that step.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all requests; their tokens must have been stored."""
        self.sequences: list[Sequence] = []
        self.rows = StepRows([])
        self.unread: UnreadStep | None = None
        self.greedy = False  # all choose the most probable token
        self.streams = False  # some deliver tokens before their end
        self._left = np.zeros(0, np.int64)  # tokens of the budgets that are not chosen
        self._chosen = np.zeros(0, np.int64)  # tokens of the answers
        self._live = np.zeros(0, bool)
        self._stops = np.zeros((0, 0), np.int64)
        self._read: list[tuple[list[Sequence], list[np.ndarray]]] = []  # tokens that are not stored, by steps

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def chosen(self) -> np.ndarray:
        """How many tokens of each answer are chosen, int [n]."""
        return self._chosen

    def drop_ended(self) -> None:
        """Drop the rows that have ended, or whose last token is chosen."""
        keep = self._live & (self._left > 0)
        if keep.all():
            return
        self.sequences = [self.sequences[i] for i in np.flatnonzero(keep)]
        self.rows.keep(keep)
        self._left, self._chosen, self._stops = self._left[keep], self._chosen[keep], self._stops[keep]
        self._changed()

    def join(self, sequences: List[Sequence], newest: dict[Sequence, int]) -> None:
        """Add requests. `newest`: index of the newest token among those of the device, where it is not read."""
        sequences = [s for s in sequences if s.left > (s in newest)]
        rows = [_row(sequence, newest.get(sequence)) for sequence in sequences]
        if not rows:
            return
        self.sequences = [*self.sequences, *sequences]
        self.rows.join(StepRows(rows))
        self._left = np.append(self._left, [s.left - (s in newest) for s in sequences])
        self._chosen = np.append(self._chosen, [len(s.answer) + (s in newest) for s in sequences])
        self._stops = _stop_ids(self.sequences)
        self._changed()

    def _changed(self) -> None:
        self._live = np.ones(len(self.sequences), bool)
        self.greedy = bool(self.sequences) and is_greedy(self.sequences)
        self.streams = any(sequence.streams for sequence in self.sequences)

    def extend(self, pages: SequencePages) -> bool:
        """Give each row a page for its next token; return False if there are too few."""
        reads = self.rows.reads
        for i in (reads % pages.size == 0).nonzero()[0].tolist():
            sequence, read = self.sequences[i], int(reads[i])
            if not pages.extend(sequence, read):
                return False
            self.rows.set_page(i, read // pages.size, sequence.tables[0][read // pages.size])
        return True

    def advance(self, both: Tensor) -> UnreadStep:
        """Return the step that chose tokens, int [2, ≥ n]; the next one reads them from the device."""
        rows = self.rows
        rows.ids = np.arange(-1, -len(self) - 1, -1)
        rows.reads = rows.reads + 1
        self._left, self._chosen = self._left - 1, self._chosen + 1
        return UnreadStep(self.sequences, Readback(both), self._left, self._live, self._stops)

    def keep_tokens(self, step: UnreadStep, ids: np.ndarray) -> None:
        """Keep the tokens of a step until they are stored."""
        if not self._read or self._read[-1][0] is not step.sequences:
            self._read.append((step.sequences, []))
        self._read[-1][1].append(ids)

    def end(self, sequence: Sequence) -> None:
        """Ignore what later steps choose for a request."""
        if sequence in self.sequences:
            self._live[self.sequences.index(sequence)] = False

    def store(self, out: Outbox) -> None:
        """Add the tokens that were read to their answers."""
        read, self._read = self._read, []
        for sequences, steps in read:
            for sequence, ids in zip(sequences, np.stack(steps, axis=1).tolist(), strict=True):
                if sequence.tables:  # otherwise it has ended
                    sequence.answer += ids
                    sequence.read = sequence.length - 1
                    out.tokens(sequence, ids)


def _row(sequence: Sequence, newest: int | None) -> Row:
    read, id = (sequence.length - 1, sequence.answer[-1]) if newest is None else (sequence.length, -newest - 1)
    return Row(sequence.tables[0], read, [id], sequence.source_pages, sequence.source)


def _stop_ids(sequences: List[Sequence]) -> np.ndarray:
    stops = [sequence.request.stop_ids for sequence in sequences]
    width = max(map(len, stops))
    if not width:
        return np.zeros((len(stops), 0), np.int64)
    return np.array([[*ids, *(-1,) * (width - len(ids))] for ids in stops], np.int64)
