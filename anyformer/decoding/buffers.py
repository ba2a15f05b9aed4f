"""Where rows are decoded: tensors that stay where they are, and on a GPU the steps that were captured over them.

To capture a step takes as long as to run many, so a place is kept when a call is over, and the next one of the same
model and shapes goes on with it.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from anyformer.cache.kv_cache import Cache
from anyformer.kernels.cuda_graph import CudaGraph, without_autocast_cache
from anyformer.kernels.runtime import autocast_dtype
from anyformer.nn.model import Transformer

T = TypeVar("T")
IDLE = 2  # places of a model that are kept at most
SHARE = 1 / 32  # of a device's memory that one of them may have


class DecodeBuffers:
    """Memory for so many rows and tokens. It knows no model: it must not keep one alive."""

    def __init__(self, cache: Cache, prompts: Cache):
        self.cache, self.prompts = cache, prompts  # of all rows, and of the prompts: one where each has one row
        self.ids = torch.zeros_like(cache.positions)
        self.there = torch.zeros_like(cache.positions, dtype=torch.bool)
        self._kept: dict[Hashable, Any] = {}
        self._graphs: dict[Hashable, CudaGraph | None] = {}
        self._pool: Any = None  # one for all graphs, which run one after the other

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What a strategy has here beside the rows, made once."""
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def run(self, key: Hashable, function: Callable[[], T]) -> T:
        """Run a function of tensors with fixed addresses, by a CUDA graph on a GPU.

        The first call runs it as it is, so that everything is compiled; the second captures it, and later ones replay
        it. The returned tensors are overwritten by the next call.
        """
        if not self.cache.length.is_cuda:
            return function()
        if key not in self._graphs:
            self._graphs[key] = None
            with without_autocast_cache():
                return function()
        graph = self._graphs[key]
        if graph is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with without_autocast_cache():
                graph = self._graphs[key] = CudaGraph(function, self._pool)
        graph.replay()
        found: T = graph.out
        return found

    def reset(self) -> None:
        self.cache.reset()
        if self.prompts is not self.cache:
            self.prompts.reset()
        self.ids.zero_()
        self.there.zero_()


# -- places that wait for the next call -------------------------------------------------------------------------------

_idle: WeakKeyDictionary[Transformer, list[tuple[Hashable, DecodeBuffers]]] = WeakKeyDictionary()


def key_of(model: Transformer, *shapes: Hashable) -> Hashable:
    """What must be the same for a place to be of use again: a captured step reads weights where they were."""
    kept = (x for part in parts_of(model) for group in (part._parameters, part._buffers) for x in group.values())
    weights = tuple(x.data_ptr() for x in kept if x is not None)
    kind = next(model.parameters()).device.type
    precision = autocast_dtype(kind)
    return weights, precision, torch.get_float32_matmul_precision(), model.backend, shapes


def parts_of(model: nn.Module) -> list[nn.Module]:
    """All modules, a shared one every time: torch's own ways through them take longer than a step does."""
    found = [model]
    for part in found:
        found.extend(x for x in part._modules.values() if x is not None)
    return found


def find_place(model: Transformer, key: Hashable) -> DecodeBuffers | None:
    """An idle one, yet to be reset; from then on it is the caller's."""
    waiting = _idle.get(model, [])
    for i, (other, place) in enumerate(waiting):
        if other == key:
            del waiting[i]
            return place
    return None


def leave_place(model: Transformer, key: Hashable, place: DecodeBuffers) -> None:
    """For the next call, where it is worth its memory."""
    device = place.cache.length.device
    if captures(device) and place.cache.nbytes() <= SHARE * _memory(device):
        _idle[model] = [*_idle.get(model, []), (key, place)][-IDLE:]


def captures(device: torch.device) -> bool:
    """Whether steps are captured there: else a place is not worth keeping."""
    return device.type == "cuda"


def _memory(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
