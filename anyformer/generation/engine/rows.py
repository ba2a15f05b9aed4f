"""Rows of one call of a model: their integers on the host, and the same as tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from anyformer.attention.cache.paged import SourcePages
from anyformer.kernels.conventions import next_power_of_two


class Row(NamedTuple):
    """One row of a call: its pages, how many of its tokens are in them, and those to read now."""

    table: list[int]
    read: int
    new: list[int]
    source_pages: list[int]
    source: tuple[int, ...]


class Shape(NamedTuple):
    """Sizes of a call: rows, tokens of each, pages of the tables, and tokens of sources that are read."""

    rows: int
    tokens: int
    pages: int
    source_pages: int  # 0 without an encoder
    source_tokens: int = 0  # 0 if the cache holds the sources

    @property
    def columns(self) -> int:
        return self.tokens + 3 + self.pages + self.source_pages + self.source_tokens

    def rounded(self, max_pages: tuple[int, int]) -> "Shape":
        """Return a shape at least as large, one of few: a CUDA graph is captured for each."""
        return self._replace(
            rows=next_power_of_two(self.rows),
            pages=min(next_power_of_two(self.pages), max_pages[0]),
            source_pages=min(next_power_of_two(self.source_pages), max_pages[1]) if self.source_pages else 0,
        )


class RowTensors(NamedTuple):
    """The tensors of a call, padded to its number of rows, tokens and pages: columns of one tensor."""

    ids: Tensor  # int [b, t]
    counts: Tensor  # int [b]: tokens of each row; 0 for a row that fills the batch up
    lengths: Tensor  # int [b]: tokens in the cache before the call
    table: Tensor  # int [b, pages]
    source: SourcePages | None
    source_ids: Tensor  # int [b, source_tokens]

    @classmethod
    def of(cls, columns: Tensor, shape: Shape) -> "RowTensors":
        ids, counts, lengths, sources, table, across, source_ids = columns.split(
            (shape.tokens, 1, 1, 1, shape.pages, shape.source_pages, shape.source_tokens), dim=1
        )
        source = SourcePages(across, sources[:, 0]) if shape.source_pages else None
        return cls(ids, counts[:, 0], lengths[:, 0], table, source, source_ids)


def fill(rows: Sequence[Row], shape: Shape) -> np.ndarray:
    """Return all integers of a call, [rows, columns]: one copy to the device."""
    out = np.zeros((shape.rows, shape.columns), dtype=np.int64)
    _, first, tables, across, sources = np.cumsum([0, shape.tokens, 3, shape.pages, shape.source_pages]).tolist()
    for i, row in enumerate(rows):
        table = row.table[: shape.pages]
        out[i, : len(row.new)] = row.new
        out[i, first : first + 3] = len(row.new), row.read, len(row.source)
        out[i, tables : tables + len(table)] = table
        if row.source_pages:
            out[i, across : across + len(row.source_pages)] = row.source_pages
        if shape.source_tokens:
            out[i, sources : sources + len(row.source)] = row.source
    return out


class StepRows:
    """Rows of decode steps as arrays: each reads one token, and is one token longer in the next step.

    `ids` are the tokens to read. One of -i - 1 is the runner's newest[i], which is known to the device only.
    """

    def __init__(self, rows: Sequence[Row]):
        n, pages = len(rows), [len(row.table) for row in rows]
        self.ids = np.fromiter((row.new[0] for row in rows), np.int64, n)
        self.reads = np.fromiter((row.read for row in rows), np.int64, n)
        self.source_lengths = np.fromiter((len(row.source) for row in rows), np.int64, n)
        self.tables = _padded([row.table for row in rows], next_power_of_two(max(pages, default=1)))
        across = [row.source_pages for row in rows]
        self.source_tables = _padded(across, max(map(len, across), default=0))

    def __len__(self) -> int:
        return len(self.ids)

    def shape(self, page_size: int) -> Shape:
        """Return the sizes of a step: a slot more than any row has tokens."""
        return Shape(len(self), 1, (int(self.reads.max()) + 1) // page_size + 1, self.source_tables.shape[1])

    def columns(self, shape: Shape) -> np.ndarray:
        """Return all integers of a step, [rows, columns], as `fill` does."""
        out, n = np.zeros((shape.rows, shape.columns), dtype=np.int64), len(self)
        out[:n, 0], out[:n, 1], out[:n, 2], out[:n, 3] = self.ids, 1, self.reads, self.source_lengths
        width = min(shape.pages, self.tables.shape[1])
        out[:n, 4 : 4 + width] = self.tables[:, :width]
        begin, width = 4 + shape.pages, self.source_tables.shape[1]
        out[:n, begin : begin + width] = self.source_tables
        return out

    def set_page(self, row: int, at: int, page: int) -> None:
        """Set page number `at` of a row's table."""
        if at >= self.tables.shape[1]:
            self.tables = _widened(self.tables, next_power_of_two(at + 1))
        self.tables[row, at] = page

    def keep(self, rows: np.ndarray) -> None:
        """Drop all other rows. `rows`: indices, or bool [n]."""
        self.ids, self.reads, self.source_lengths = self.ids[rows], self.reads[rows], self.source_lengths[rows]
        self.tables, self.source_tables = self.tables[rows], self.source_tables[rows]

    def join(self, other: "StepRows") -> None:
        """Add rows after these."""
        self.ids, self.reads = np.append(self.ids, other.ids), np.append(self.reads, other.reads)
        self.source_lengths = np.append(self.source_lengths, other.source_lengths)
        self.tables = _stacked(self.tables, other.tables)
        self.source_tables = _stacked(self.source_tables, other.source_tables)


def _padded(lists: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Return lists as the rows of a matrix, filled up with zeros."""
    return np.array([[*values, *(0,) * (width - len(values))] for values in lists], np.int64).reshape(len(lists), width)


def _widened(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, max(0, width - x.shape[1]))))


def _stacked(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    width = max(a.shape[1], b.shape[1])
    return np.concatenate((_widened(a, width), _widened(b, width)))
