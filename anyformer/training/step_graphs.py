"""CUDA graphs of training steps: a step is captured when its shapes recur, and from then on replayed.

A step launches about a thousand kernels. On a fast GPU each is finished before the CPU has launched the next, so that
the step is launch-bound; a replay is a single launch.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer.data.batch import to_device
from anyformer.kernels.cuda_graph import CudaGraph

WARMUP_STEPS = 2  # with the same shapes before a capture: compilation and allocations are over by then
MAX_GRAPHS = 8  # each keeps the memory of its intermediate tensors


class StepGraph(NamedTuple):
    inputs: list[Any]  # the tensors among them have fixed addresses
    graph: CudaGraph


class StepGraphs:
    """Run functions of inputs on the CPU, trees of tensors and constants, by a CUDA graph for each set of shapes.

    With the same constants and shapes, the work may depend on nothing but the values of the tensors. The next call
    overwrites the returned tensor.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seen: Counter[Any] = Counter()
        self.graphs: dict[Any, StepGraph] = {}
        self.pool: Any = None  # memory that all graphs share: one runs at a time

    def run(self, work: Callable[[Any], Tensor], inputs: Any) -> Tensor:
        leaves, rebuild = flatten(inputs)
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        if key not in self.graphs:
            self.seen[key] += 1
            fixed = [to_device(x, self.device) if isinstance(x, Tensor) else x for x in leaves]
            if self.seen[key] <= WARMUP_STEPS or len(self.graphs) == MAX_GRAPHS:
                return work(rebuild(fixed))
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # a capture cannot free memory of the allocator
            self.graphs[key] = StepGraph(fixed, CudaGraph(lambda: work(rebuild(fixed)), self.pool))
        return self._replay(self.graphs[key], leaves)

    def _replay(self, step: StepGraph, inputs: list[Any]) -> Tensor:
        for fixed, x in zip(step.inputs, inputs, strict=True):
            if isinstance(x, Tensor):
                fixed.copy_(x.pin_memory(), non_blocking=True)
        step.graph.replay()
        out: Tensor = step.graph.out
        return out


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of nested tuples, lists and dicts, and a function that rebuilds the tree from other leaves."""
    leaves = list(_leaves(tree))
    return leaves, lambda others: _rebuild(tree, iter(others))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, tuple | list | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(part)
    else:
        yield tree


def _rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    match tree:
        case dict():
            return {key: _rebuild(part, leaves) for key, part in tree.items()}
        case tuple() | list():
            parts = [_rebuild(part, leaves) for part in tree]
            return getattr(tree, "_make", type(tree))(parts)  # a NamedTuple takes its fields one by one
        case _:
            return next(leaves)
