"""Decode buffers: tensors with fixed addresses, and the CUDA graphs that were captured over them.

Capturing a step takes as long as running many steps. So the buffers of a finished call are kept, and the next call with
the same model and shapes continues with them and their graphs.
"""

import math
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from anyformer.attention.cache.kv_cache import Cache
from anyformer.kernels.cuda_graph import CudaGraphs
from anyformer.kernels.runtime import autocast_dtype
from anyformer.nn.eval_mode import submodules
from anyformer.nn.model import Transformer

T = TypeVar("T")
MAX_IDLE = 2  # idle buffers per model
MAX_MEMORY_SHARE = 1 / 32  # of the device's memory that idle buffers may take, each


class DecodeBuffers:
    """Caches and ids for a fixed number of rows and tokens. It holds no reference to the model, which may be freed."""

    def __init__(self, cache: Cache, prompts: Cache):
        self.cache, self.prompts = cache, prompts  # of all rows, and one row per prompt; the same without copies
        self.ids = torch.zeros_like(cache.positions)
        self.present = torch.zeros_like(cache.positions, dtype=torch.bool)
        self._kept: dict[Hashable, Any] = {}
        self._graphs = CudaGraphs()

    def keep(self, key: Hashable | None, make: Callable[[], T]) -> T:
        """Return further state of a strategy, made once; without a key, anew."""
        if key is None:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        state: T = self._kept[key]
        return state

    def run(self, key: Hashable, function: Callable[[], T]) -> T:
        """Run a function of tensors with fixed addresses, by a CUDA graph on a GPU.

        The returned tensors are overwritten by the next call.
        """
        return self._graphs.run(key, function) if self.cache.length.is_cuda else function()

    def reset(self) -> None:
        self.cache.reset()
        if self.prompts is not self.cache:
            self.prompts.reset()
        self.ids.zero_()
        self.present.zero_()


# -- idle buffers -----------------------------------------------------------------------------------------------------

_idle: WeakKeyDictionary[Transformer, list[tuple[Hashable, DecodeBuffers]]] = WeakKeyDictionary()
_lock = Lock()  # threads of a server may decode at the same time


def key_of(model: Transformer, *shapes: Hashable) -> Hashable:
    """Return a key that is equal if captured steps are valid: they read weights at fixed addresses."""
    groups = (group for module in submodules(model) for group in (module._parameters, module._buffers))
    weights = tuple(x.data_ptr() for group in groups for x in group.values() if x is not None)
    kind = next(model.parameters()).device.type
    precision = autocast_dtype(kind)
    return weights, precision, torch.get_float32_matmul_precision(), model.backend, shapes


def take_buffers(model: Transformer, key: Hashable) -> DecodeBuffers | None:
    """Remove idle buffers of this key and return them, not yet reset; None if there are none."""
    with _lock:
        idle = _idle.get(model, [])
        for i, (other, buffers) in enumerate(idle):
            if other == key:
                del idle[i]
                return buffers
    return None


def release_buffers(model: Transformer, key: Hashable, buffers: DecodeBuffers) -> None:
    """Keep buffers for the next call, unless they take too much memory."""
    device = buffers.cache.length.device
    if captures(device) and buffers.cache.nbytes() <= MAX_MEMORY_SHARE * _memory(device):
        with _lock:
            _idle[model] = [*_idle.get(model, []), (key, buffers)][-MAX_IDLE:]


def captures(device: torch.device) -> bool:
    """Return whether steps are captured on this device; elsewhere buffers are not kept."""
    return device.type == "cuda"


def _memory(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
