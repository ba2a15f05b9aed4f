"""Calls of a model on rows of its pool: prefill of prompts and sources, and decode steps, replayed on a GPU."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyformer.attention.layout import Layout
from anyformer.cache.paged import PagedCache, Pool, Source
from anyformer.conventions import PADDING, next_power_of_two
from anyformer.decoding.prefill import synchronises
from anyformer.decoding.sampling import greedy
from anyformer.kernels.cuda_graph import CudaGraph, without_autocast_cache
from anyformer.kernels.prepacked import PrepackedWeights, use_prepacked
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer
from anyformer.serve.admission import limits_of
from anyformer.serve.request import Limits
from anyformer.serve.sequence import on_device

# cuDNN makes a plan for each new shape, which takes longer than the attention of a prompt; shapes of prompts vary
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

SHORT = 5e11  # tokens · parameters below which prompts are read by CUDA graphs: about 2 ms of an H200


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


class RowTensors(NamedTuple):
    """The tensors of a call, padded to its number of rows, tokens and pages: columns of one tensor."""

    ids: Tensor  # int [b, t]
    counts: Tensor  # int [b]: tokens of each row; 0 for a row that fills the batch up
    lengths: Tensor  # int [b]: tokens in the cache before the call
    table: Tensor  # int [b, pages]
    source: Source | None
    source_ids: Tensor  # int [b, source_tokens]

    @classmethod
    def of(cls, columns: Tensor, shape: Shape) -> "RowTensors":
        ids, counts, lengths, sources, table, across, source_ids = columns.split(
            (shape.tokens, 1, 1, 1, shape.pages, shape.source_pages, shape.source_tokens), dim=1
        )
        source = Source(across, sources[:, 0]) if shape.source_pages else None
        return cls(ids, counts[:, 0], lengths[:, 0], table, source, source_ids)


class Columns:
    """All integers of a call on the host, [rows, columns]: one copy to the device.

    Those of the last call are kept: in a decode step most rows are the same as before, one token longer.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._tables: list[list[int]] = []
        self._shape: Shape | None = None
        self._out = np.zeros((0, 0), dtype=np.int64)

    def fill(self, rows: Sequence[Row], shape: Shape) -> np.ndarray:
        known, n = self._tables, len(rows)
        same = shape == self._shape and shape.tokens == 1 and len(known) == n
        if not same or any(row.table is not table for row, table in zip(rows, known, strict=True)):
            self._tables, self._shape, self._out = [row.table for row in rows], shape, _fill(rows, shape)
            return self._out
        reads = np.fromiter((row.read for row in rows), np.int64, n)
        pages = np.fromiter((row.table[row.read // self._page_size] for row in rows), np.int64, n)
        self._out[:n, 0] = np.fromiter((row.new[0] for row in rows), np.int64, n)
        self._out[:n, 2] = reads
        self._out[np.arange(n), 4 + reads // self._page_size] = pages  # the only page that may be new
        return self._out


def _fill(rows: Sequence[Row], shape: Shape) -> np.ndarray:
    out = np.zeros((shape.rows, shape.columns), dtype=np.int64)
    _, first, tables, across, sources = np.cumsum([0, shape.tokens, 3, shape.pages, shape.source_pages])
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


class Runner:
    """Runs the models that share a pool: a body, and the same body with adapters."""

    def __init__(self, pool: Pool, limits: Limits, device: torch.device, max_pages: tuple[int, int]):
        self.pool, self.limits, self.device, self.max_pages = pool, limits, device, max_pages
        self._columns = Columns(pool.page_size)
        self._prepacked = PrepackedWeights()
        self._graphs: dict[Hashable, _Replay] = {}
        self._parameters: dict[int, int] = {}  # of each model
        self._memory: Any = None  # one pool for all graphs, which run one after the other

    def prefill(self, model: Transformer, rows: Sequence[Row], with_sources: bool) -> Tensor:
        """Read tokens of each row, and its source; return hidden states [b, t, d]."""
        size = self.limits.chunk if self.limits.reproducible else max(len(row.new) for row in rows)
        source = max(len(row.source) for row in rows) if with_sources else 0
        shape = Shape(len(rows), size, self._width(rows), self._source_width(rows), source)
        fresh = not any(row.read for row in rows)
        if fresh and self._captures(model) and self._is_short(model, shape):
            longest = limits_of(model)
            shape = Shape(
                next_power_of_two(shape.rows),
                _round_up(size, longest[0]),
                min(next_power_of_two(shape.pages), self.max_pages[0]),
                min(next_power_of_two(shape.source_pages), self.max_pages[1]) if shape.source_pages else 0,
                _round_up(source, longest[1]) if source else 0,
            )
            read = partial(self._read, model, shape=shape, bound=None)
            return self._replay(("read", id(model), shape), shape, _fill(rows, shape), None, read)
        inputs = RowTensors.of(on_device(_fill(rows, shape), self.device), shape)
        with use_prepacked(self._prepacked, inputs.ids.numel()):
            return self._read(model, inputs, shape, None if fresh else max(row.read + size for row in rows))

    def _read(self, model: Transformer, inputs: RowTensors, shape: Shape, bound: int | None) -> Tensor:
        """Read prompts. `bound`: above all positions; None if no row has tokens in the cache."""
        encoder_out = layout = None
        with sdpa_kernel(WITHOUT_PLANS):
            if shape.source_tokens:
                assert inputs.source is not None
                index = torch.arange(shape.source_tokens, device=self.device)
                layout = Layout.right_padded(torch.where(index < inputs.source.lengths[:, None], 0, PADDING))
                encoder_out = model.encode(Inputs(inputs.source_ids, layout))
            new_source = shape.source_tokens or None
            cache = PagedCache(self.pool, inputs.table, inputs.lengths, inputs.source, new_source, bound is None)
            new = cache.next(shape.tokens, _present(inputs), bound)
            return model.decode(Inputs(inputs.ids, new), encoder_out, source=layout, cache=cache)

    def decode(
        self, model: Transformer, rows: Sequence[Row], newest: Tensor | None = None, chooses: bool = False
    ) -> Tensor:
        """Read one token of each row; return the logits of the next one [rows, v].

        An id of -i - 1 is newest[i], which is known to the device only. `chooses`: return the most probable tokens, and
        whether their logits are finite, int [2, rows].
        """
        count, width, across = len(rows), self._width(rows), self._source_width(rows)
        captures = self._captures(model)
        if captures or self.limits.reproducible:
            count = self.limits.max_rows if self.limits.reproducible else next_power_of_two(count)
            width = min(next_power_of_two(width), self.max_pages[0])
            across = min(next_power_of_two(across), self.max_pages[1]) if across else 0
        shape = Shape(count, 1, width, across)
        columns, step = self._columns.fill(rows, shape), partial(self._choose if chooses else self._step, model)
        if captures:
            out = self._replay(("step", chooses, id(model), shape), shape, columns, newest, step)
        else:
            with use_prepacked(self._prepacked, count):
                out = step(RowTensors.of(_with_newest(on_device(columns, self.device), newest), shape))
        return out[:, : len(rows)] if chooses else out[: len(rows)]

    def _captures(self, model: Transformer) -> bool:
        return self.device.type == "cuda" and not synchronises(model)

    def _is_short(self, model: Transformer, shape: Shape) -> bool:
        """Return whether a GPU takes less time for a call than the host for launching its kernels."""
        if id(model) not in self._parameters:
            self._parameters[id(model)] = model.num_parameters()
        return shape.rows * (shape.tokens + shape.source_tokens) * self._parameters[id(model)] < SHORT

    def _replay(
        self,
        key: Hashable,
        shape: Shape,
        columns: np.ndarray,
        newest: Tensor | None,
        function: Callable[[RowTensors], Tensor],
    ) -> Tensor:
        """Call a function of a fixed shape by the CUDA graph of this key."""
        if key not in self._graphs:
            fixed = torch.empty(columns.shape, dtype=torch.long, device=self.device)
            self._graphs[key] = _Replay(fixed, partial(function, RowTensors.of(fixed, shape)), self.limits.reproducible)
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        return self._graphs[key](_with_newest(on_device(columns, self.device), newest), self._memory)

    def _step(self, model: Transformer, inputs: RowTensors) -> Tensor:
        cache = PagedCache(self.pool, inputs.table, inputs.lengths, inputs.source)
        hidden = model.decode(Inputs(inputs.ids, cache.next(1, _present(inputs), 0)), cache=cache)
        return next_logits(model, hidden[:, -1])

    def _choose(self, model: Transformer, inputs: RowTensors) -> Tensor:
        return torch.stack(greedy(at_least_fp32(self._step(model, inputs))))

    def _width(self, rows: Sequence[Row]) -> int:
        """Return the pages of the table: a slot more than any row has tokens."""
        if self.limits.reproducible:
            return self.max_pages[0]
        return max((row.read + len(row.new)) // self.pool.page_size + 1 for row in rows)

    def _source_width(self, rows: Sequence[Row]) -> int:
        if not self.pool.source_pages:
            return 0
        return self.max_pages[1] if self.limits.reproducible else max(len(row.source_pages) for row in rows)


def _with_newest(columns: Tensor, newest: Tensor | None) -> Tensor:
    """Return columns whose ids of -i - 1 are newest[i]."""
    if newest is not None:
        ids = columns[:, 0]
        ids.copy_(torch.where(ids < 0, newest[(-ids - 1).clamp(min=0)], ids))
    return columns


def _round_up(n: int, longest: int | None) -> int:
    """Round up to few different sizes, at most a quarter larger."""
    step = max(16, next_power_of_two(n) // 4)
    n = n if n == 1 else -(-n // step) * step
    return n if longest is None else min(n, longest)


def next_logits(model: Transformer, hidden: Tensor) -> Tensor:
    """Return the logits [n, v] after hidden states [n, d]; the head does not read positions."""
    return model.apply_head(hidden[:, None], Layout(torch.zeros(len(hidden), 1, dtype=torch.long)))[:, 0]


def _present(inputs: RowTensors) -> Tensor:
    return torch.arange(inputs.ids.shape[1], device=inputs.ids.device) < inputs.counts[:, None]


class _Replay:
    """A step of fixed shape, captured at its second call, or at its first: then all calls round alike."""

    def __init__(self, columns: Tensor, function: Callable[[], Tensor], at_once: bool):
        self._columns, self._function, self._warm = columns, function, False  # the function reads these columns
        self._graph: CudaGraph | None = None
        self._at_once = at_once

    def __call__(self, columns: Tensor, memory: Any) -> Tensor:
        self._columns.copy_(columns)
        with without_autocast_cache():
            if not self._warm:  # run as it is, so that everything is compiled; a second run writes the same
                self._warm = True
                out = self._function()
                if not self._at_once:
                    return out
            if self._graph is None:
                self._graph = CudaGraph(self._function, memory)
        self._graph.replay()
        found: Tensor = self._graph.out
        return found
