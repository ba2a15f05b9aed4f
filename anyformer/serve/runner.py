"""Calls of a model on rows of its pool: prefill of prompts and sources, and decode steps, replayed on a GPU."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class Row(NamedTuple):
    """One row of a call: its pages, how many of its tokens are in them, and those to read now."""

    table: list[int]
    read: int
    new: list[int]
    source_pages: list[int]
    source: tuple[int, ...]


class RowTensors(NamedTuple):
    """The tensors of a call, padded to its number of rows, tokens and pages."""

    ids: Tensor  # int [b, t]
    counts: Tensor  # int [b]: tokens of each row; 0 for a row that fills the batch up
    lengths: Tensor  # int [b]: tokens in the cache before the call
    table: Tensor  # int [b, pages]
    source: Source | None

    def tensors(self) -> list[Tensor]:
        return [self.ids, self.counts, self.lengths, self.table, *(self.source or ())]


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
        inputs = self._inputs(rows, len(rows), size, self._width(rows), self._source_width(rows))
        encoder_out = layout = new_source = None
        if with_sources:
            ids, segments = pad_rows([row.source for row in rows], self.device)
            layout = make_layout(len(ids), ids.shape[1], self.device, segments=segments)
            encoder_out, new_source = model.encode(Inputs(ids, layout)), ids.shape[1]
        fresh = not any(row.read for row in rows)
        cache = PagedCache(self.pool, inputs.table, inputs.lengths, inputs.source, new_source, fresh)
        new = cache.next(size, _present(inputs), max(row.read + size for row in rows))
        with use_prepacked(self._prepacked, inputs.ids.numel()):
            return model.decode(Inputs(inputs.ids, new), encoder_out, source=layout, cache=cache)

    def decode(self, model: Transformer, rows: Sequence[Row], newest: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Read one token of each row; return the logits of the next one [rows, v].

        `newest`: tokens [rows, 1] that replace those of the rows, and where.
        """
        count, width, across = len(rows), self._width(rows), self._source_width(rows)
        captures = self.device.type == "cuda" and not synchronises(model)
        if captures or self.limits.reproducible:
            count = self.limits.max_rows if self.limits.reproducible else next_power_of_two(count)
            width = min(next_power_of_two(width), self.max_pages[0])
            across = min(next_power_of_two(across), self.max_pages[1])
        inputs = self._inputs(rows, count, 1, width, across)
        if newest is not None:
            inputs.ids[: len(rows)] = torch.where(newest[1], newest[0], inputs.ids[: len(rows)])
        if not captures:
            with use_prepacked(self._prepacked, count):
                return self._step(model, inputs)[: len(rows)]
        key = id(model), count, width, across
        if key not in self._graphs:
            self._graphs[key] = _Replay(inputs, lambda fixed: self._step(model, fixed))
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        return self._graphs[key](inputs, self._memory)[: len(rows)]

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
        if not self.pool.source_pages or self.limits.reproducible:
            return self.max_pages[1]
        return max(len(row.source_pages) for row in rows)

    def _inputs(self, rows: Sequence[Row], count: int, length: int, width: int, across: int) -> RowTensors:
        empty = [Row([], 0, [], [], ())] * (count - len(rows))
        filled = [*rows, *empty]
        ids = [row.new + [0] * (length - len(row.new)) for row in filled]
        numbers = [[len(row.new), row.read, len(row.source)] for row in filled]
        tables = [row.table[:width] + [0] * (width - len(row.table)) for row in filled]
        counts, lengths, sources = self._tensor(numbers).unbind(1)
        source = None
        if self.pool.source_pages:
            across_tables = [row.source_pages + [0] * (across - len(row.source_pages)) for row in filled]
            source = Source(self._tensor(across_tables), sources)
        return RowTensors(self._tensor(ids), counts, lengths, self._tensor(tables), source)

    def _tensor(self, values: list[list[int]]) -> Tensor:
        return on_device(values, self.device)


def next_logits(model: Transformer, hidden: Tensor) -> Tensor:
    """Return the logits [n, v] after hidden states [n, d]; the head does not read positions."""
    return model.apply_head(hidden[:, None], Layout(torch.zeros(len(hidden), 1, dtype=torch.long)))[:, 0]


def _present(inputs: RowTensors) -> Tensor:
    return torch.arange(inputs.ids.shape[1], device=inputs.ids.device) < inputs.counts[:, None]


class _Replay:
    """A step of fixed shape: run once as it is, so that everything is compiled, then captured and replayed."""

    def __init__(self, inputs: RowTensors, function: Callable[[RowTensors], Tensor]):
        source = None if inputs.source is None else Source(*(x.clone() for x in inputs.source))
        ids, counts, lengths, table = (x.clone() for x in inputs[:4])
        self._fixed = RowTensors(ids, counts, lengths, table, source)
        self._function, self._warm = function, False
        self._graph: CudaGraph | None = None

    def __call__(self, inputs: RowTensors, memory: Any) -> Tensor:
        for own, given in zip(self._fixed.tensors(), inputs.tensors(), strict=True):
            own.copy_(given)
        with without_autocast_cache():
            if not self._warm:
                self._warm = True
                return self._function(self._fixed)
            if self._graph is None:
                self._graph = CudaGraph(lambda: self._function(self._fixed), memory)
        self._graph.replay()
        out: Tensor = self._graph.out
        return out
