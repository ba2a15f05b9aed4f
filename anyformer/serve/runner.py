"""Calls of a model on rows of its pool: prefill of prompts and sources, and decode steps, replayed on a GPU."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyformer.attention.layout import Layout, make_layout
from anyformer.attention.padding import pad_rows
from anyformer.cache.paged import PagedCache, Pool, Source
from anyformer.conventions import next_power_of_two
from anyformer.decoding.prefill import synchronises
from anyformer.kernels.cuda_graph import CudaGraph, without_autocast_cache
from anyformer.kernels.prepacked import PrepackedWeights, use_prepacked
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer
from anyformer.serve.request import Limits
from anyformer.serve.sequence import on_device

# cuDNN makes a plan for each new shape, which takes longer than the attention of a prompt; shapes of prompts vary
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Row(NamedTuple):
    """One row of a call: its pages, how many of its tokens are in them, and those to read now."""

    table: list[int]
    read: int
    new: list[int]
    source_pages: list[int]
    source: tuple[int, ...]


class Shape(NamedTuple):
    """Sizes of a call: rows, tokens of each, and pages of the tables."""

    rows: int
    tokens: int
    pages: int
    source_pages: int  # 0 without an encoder

    @property
    def columns(self) -> int:
        return self.tokens + 3 + self.pages + self.source_pages


class RowTensors(NamedTuple):
    """The tensors of a call, padded to its number of rows, tokens and pages: columns of one tensor."""

    ids: Tensor  # int [b, t]
    counts: Tensor  # int [b]: tokens of each row; 0 for a row that fills the batch up
    lengths: Tensor  # int [b]: tokens in the cache before the call
    table: Tensor  # int [b, pages]
    source: Source | None

    @classmethod
    def of(cls, columns: Tensor, shape: Shape) -> "RowTensors":
        ids, counts, lengths, sources, table, across = columns.split(
            (shape.tokens, 1, 1, 1, shape.pages, shape.source_pages), dim=1
        )
        source = Source(across, sources[:, 0]) if shape.source_pages else None
        return cls(ids, counts[:, 0], lengths[:, 0], table, source)


class Runner:
    """Runs the models that share a pool: a body, and the same body with adapters."""

    def __init__(self, pool: Pool, limits: Limits, device: torch.device, max_pages: tuple[int, int]):
        self.pool, self.limits, self.device, self.max_pages = pool, limits, device, max_pages
        self._prepacked = PrepackedWeights()
        self._graphs: dict[Hashable, _Replay] = {}
        self._memory: Any = None  # one pool for all graphs, which run one after the other

    def prefill(self, model: Transformer, rows: Sequence[Row], with_sources: bool) -> Tensor:
        """Read tokens of each row, and its source; return hidden states [b, t, d]."""
        fixed = self.limits.reproducible
        size = self.limits.chunk if fixed else max(len(row.new) for row in rows)
        shape = Shape(len(rows), size, self._width(rows), self._source_width(rows))
        inputs = RowTensors.of(self._columns(rows, shape), shape)
        encoder_out = layout = new_source = None
        if with_sources:
            ids, segments = pad_rows([row.source for row in rows], self.device)
            layout = make_layout(len(ids), ids.shape[1], self.device, segments=segments)
            with sdpa_kernel(WITHOUT_PLANS):
                encoder_out, new_source = model.encode(Inputs(ids, layout)), ids.shape[1]
        fresh = not any(row.read for row in rows)
        cache = PagedCache(self.pool, inputs.table, inputs.lengths, inputs.source, new_source, fresh)
        new = cache.next(size, _present(inputs), max(row.read + size for row in rows))
        with use_prepacked(self._prepacked, inputs.ids.numel()), sdpa_kernel(WITHOUT_PLANS):
            return model.decode(Inputs(inputs.ids, new), encoder_out, source=layout, cache=cache)

    def decode(self, model: Transformer, rows: Sequence[Row], newest: Tensor | None = None) -> Tensor:
        """Read one token of each row; return the logits of the next one [rows, v].

        An id of -i - 1 is newest[i], which is known to the device only.
        """
        count, width, across = len(rows), self._width(rows), self._source_width(rows)
        captures = self.device.type == "cuda" and not synchronises(model)
        if captures or self.limits.reproducible:
            count = self.limits.max_rows if self.limits.reproducible else next_power_of_two(count)
            width = min(next_power_of_two(width), self.max_pages[0])
            across = min(next_power_of_two(across), self.max_pages[1])
        shape = Shape(count, 1, width, across)
        columns = self._columns(rows, shape)
        if newest is not None:
            ids = columns[:, 0]
            ids.copy_(torch.where(ids < 0, newest[(-ids - 1).clamp(min=0)], ids))
        if not captures:
            with use_prepacked(self._prepacked, count):
                return self._step(model, RowTensors.of(columns, shape))[: len(rows)]
        key = id(model), shape
        if key not in self._graphs:
            fixed = torch.empty_like(columns)
            self._graphs[key] = _Replay(fixed, partial(self._step, model, RowTensors.of(fixed, shape)))
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        return self._graphs[key](columns, self._memory)[: len(rows)]

    def _step(self, model: Transformer, inputs: RowTensors) -> Tensor:
        cache = PagedCache(self.pool, inputs.table, inputs.lengths, inputs.source)
        hidden = model.decode(Inputs(inputs.ids, cache.next(1, _present(inputs), 0)), cache=cache)
        return next_logits(model, hidden[:, -1])

    def _width(self, rows: Sequence[Row]) -> int:
        """Return the pages of the table: a slot more than any row has tokens."""
        if self.limits.reproducible:
            return self.max_pages[0]
        return max((row.read + len(row.new)) // self.pool.page_size + 1 for row in rows)

    def _source_width(self, rows: Sequence[Row]) -> int:
        if not self.pool.source_pages:
            return 0
        return self.max_pages[1] if self.limits.reproducible else max(len(row.source_pages) for row in rows)

    def _columns(self, rows: Sequence[Row], shape: Shape) -> Tensor:
        """Return all integers of a call in one tensor, [rows, columns]: one copy to the device."""
        out = np.zeros((shape.rows, shape.columns), dtype=np.int64)
        first = shape.tokens
        tables = out[:, first + 3 :]
        for i, row in enumerate(rows):
            new, table, source_pages = row.new, row.table[: shape.pages], row.source_pages
            out[i, : len(new)] = new
            out[i, first : first + 3] = len(new), row.read, len(row.source)
            tables[i, : len(table)] = table
            if source_pages:
                tables[i, shape.pages : shape.pages + len(source_pages)] = source_pages
        return on_device(out, self.device)


def next_logits(model: Transformer, hidden: Tensor) -> Tensor:
    """Return the logits [n, v] after hidden states [n, d]; the head does not read positions."""
    return model.apply_head(hidden[:, None], Layout(torch.zeros(len(hidden), 1, dtype=torch.long)))[:, 0]


def _present(inputs: RowTensors) -> Tensor:
    return torch.arange(inputs.ids.shape[1], device=inputs.ids.device) < inputs.counts[:, None]


class _Replay:
    """A step of fixed shape: run once as it is, so that everything is compiled, then captured and replayed."""

    def __init__(self, columns: Tensor, function: Callable[[], Tensor]):
        self._columns, self._function, self._warm = columns, function, False  # the function reads these columns
        self._graph: CudaGraph | None = None

    def __call__(self, columns: Tensor, memory: Any) -> Tensor:
        self._columns.copy_(columns)
        with without_autocast_cache():
            if not self._warm:
                self._warm = True
                return self._function()
            if self._graph is None:
                self._graph = CudaGraph(self._function, memory)
        self._graph.replay()
        out: Tensor = self._graph.out
        return out
