"""Calls of a model on rows of its pool: prefill of prompts and sources, and decode steps, replayed on a GPU."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from anyformer.attention.attend import without_plans
from anyformer.attention.cache.paged import PagedCache, Pool
from anyformer.attention.layout import Layout
from anyformer.generation.engine.admission import limits_of
from anyformer.generation.engine.interface import Limits
from anyformer.generation.engine.rows import Row, RowTensors, Shape, StepRows, fill
from anyformer.generation.engine.sequence import on_device
from anyformer.generation.prefill import synchronises
from anyformer.generation.sampling import greedy
from anyformer.generation.step import step
from anyformer.kernels.conventions import PADDING, next_power_of_two
from anyformer.kernels.cuda_graph import CudaGraphs
from anyformer.kernels.prepacked import PrepackedWeights, use_prepacked
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer

SHORT = 1.3e12  # tokens · parameters below which prompts are read by CUDA graphs: about 5 ms of an H200


class Runner:
    """Runs the models that share a pool: a body, and the same body with adapters."""

    def __init__(self, pool: Pool, limits: Limits, device: torch.device, max_pages: tuple[int, int]):
        self.pool, self.limits, self.device, self.max_pages = pool, limits, device, max_pages
        # tokens that steps have chosen, for the next step: those of a decode step, and from `first` on those of prompts
        self.first = next_power_of_two(limits.max_rows)
        self.newest = torch.zeros(2 * self.first, dtype=torch.long, device=device)
        self._prepacked = PrepackedWeights()
        self._graphs, self._fixed_columns = CudaGraphs(), dict[Hashable, Tensor]()
        self._parameters: dict[int, int] = {}  # of each model
        self._graph_safe: dict[int, bool] = {}  # whether a model can be captured

    def prefill(self, model: Transformer, rows: Sequence[Row], with_sources: bool) -> Tensor:
        """Read tokens of each row, and its source; return hidden states [b, t, d]."""
        size = self.limits.chunk if self.limits.reproducible else max(len(row.new) for row in rows)
        source = max(len(row.source) for row in rows) if with_sources else 0
        width = max((row.read + len(row.new)) // self.pool.page_size + 1 for row in rows)
        shape = self._fixed(Shape(len(rows), size, width, max(len(row.source_pages) for row in rows), source))
        fresh = not any(row.read for row in rows)
        if fresh and self._captures(model) and self._is_short(model, shape):
            longest = limits_of(model)
            shape = shape.rounded(self.max_pages)._replace(
                tokens=_round_up(size, longest[0]), source_tokens=_round_up(source, longest[1]) if source else 0
            )
            read = partial(self._read, model, shape=shape, bound=None)
            return self._replay(("read", id(model), shape), shape, fill(rows, shape), read)
        inputs = RowTensors.of(on_device(fill(rows, shape), self.device), shape)
        with use_prepacked(self._prepacked, inputs.ids.numel()):
            return self._read(model, inputs, shape, None if fresh else max(row.read + size for row in rows))

    def _read(self, model: Transformer, inputs: RowTensors, shape: Shape, bound: int | None) -> Tensor:
        """Read prompts. `bound`: above all positions; None if no row has tokens in the cache."""
        encoder_out = layout = None
        with without_plans():
            if shape.source_tokens:
                assert inputs.source is not None
                index = torch.arange(shape.source_tokens, device=self.device)
                layout = Layout.right_padded(torch.where(index < inputs.source.lengths[:, None], 0, PADDING))
                encoder_out = model.encode(Inputs(inputs.source_ids, layout))
            new_source = shape.source_tokens or None
            cache = PagedCache(self.pool, inputs.table, inputs.lengths, inputs.source, new_source, bound is None)
            new = cache.next(shape.tokens, _present(inputs), bound)
            return model.decode(Inputs(inputs.ids, new), encoder_out, source=layout, cache=cache)

    def decode(self, model: Transformer, rows: StepRows, chooses: bool = False) -> Tensor:
        """Read one token of each row; return the logits of the next one [≥ rows, v].

        `chooses`: return the most probable tokens, and whether their logits are finite, int [2, ≥ rows]. They are the
        first of `newest` then.
        """
        shape, captures = self._fixed(rows.shape(self.pool.page_size)), self._captures(model)
        if self.limits.reproducible:
            shape = shape._replace(rows=self.limits.max_rows)
        elif captures:
            shape = shape.rounded(self.max_pages)
        columns, step = rows.columns(shape), partial(self._choose if chooses else self._step, model)
        if captures:
            return self._replay(("step", chooses, id(model), shape), shape, columns, step)
        with use_prepacked(self._prepacked, shape.rows):
            return step(RowTensors.of(on_device(columns, self.device), shape))

    def _fixed(self, shape: Shape) -> Shape:
        """Return a shape with tables of the same size in every call of a reproducible engine."""
        if not self.limits.reproducible:
            return shape
        return shape._replace(pages=self.max_pages[0], source_pages=self.max_pages[1] if shape.source_pages else 0)

    def _captures(self, model: Transformer) -> bool:
        if self.device.type != "cuda":
            return False
        if id(model) not in self._graph_safe:
            self._graph_safe[id(model)] = not synchronises(model)
        return self._graph_safe[id(model)]

    def _is_short(self, model: Transformer, shape: Shape) -> bool:
        """Return whether a GPU takes less time for a call than the host for launching its kernels."""
        if id(model) not in self._parameters:
            self._parameters[id(model)] = model.num_parameters()
        return shape.rows * (shape.tokens + shape.source_tokens) * self._parameters[id(model)] < SHORT

    def _replay(
        self, key: Hashable, shape: Shape, columns: np.ndarray, function: Callable[[RowTensors], Tensor]
    ) -> Tensor:
        """Call a function of a fixed shape by the CUDA graph of this key."""
        if key not in self._fixed_columns:
            self._fixed_columns[key] = torch.empty(columns.shape, dtype=torch.long, device=self.device)
        fixed = self._fixed_columns[key]
        fixed.copy_(torch.from_numpy(columns).pin_memory(), non_blocking=True)
        return self._graphs.run(key, lambda: function(RowTensors.of(fixed, shape)), self.limits.reproducible)

    def _step(self, model: Transformer, inputs: RowTensors) -> Tensor:
        ids = inputs.ids[:, 0]
        ids.copy_(torch.where(ids < 0, self.newest[(-ids - 1).clamp(min=0)], ids))  # in place: the same if repeated
        cache = PagedCache(self.pool, inputs.table, inputs.lengths, inputs.source)
        return step(model, cache, inputs.ids, _present(inputs), bound=0)[1][:, -1]

    def _choose(self, model: Transformer, inputs: RowTensors) -> Tensor:
        chosen = torch.stack(greedy(at_least_fp32(self._step(model, inputs))))
        self.newest[: chosen.shape[1]] = chosen[0]
        return chosen


def _round_up(n: int, longest: int | None) -> int:
    """Round up to few different sizes, at most a quarter larger."""
    step = max(16, next_power_of_two(n) // 4)
    n = n if n == 1 else -(-n // step) * step
    return n if longest is None else min(n, longest)


def _present(inputs: RowTensors) -> Tensor:
    return torch.arange(inputs.ids.shape[1], device=inputs.ids.device) < inputs.counts[:, None]
