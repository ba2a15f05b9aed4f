"""CUDA graphs: the kernels of a function, captured once and replayed as one launch."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_for_capture: ContextVar[bool] = ContextVar("for_capture", default=False)


class CudaGraph:
    """A captured function of tensors with fixed addresses.

    `replay` runs its kernels on the values that these tensors hold then, and overwrites `out`. Graphs that share a
    `pool` (`torch.cuda.graph_pool_handle()`) share memory: `out` of one is lost when another is replayed.

    `torch.cuda.graph` is not used because it synchronises the device, runs the garbage collector and empties the
    allocator's cache before each capture. Decoding captures several small graphs per call, and the next allocations
    would all go to the driver. While a graph is captured the allocator cannot return cached blocks to the driver, so a
    caller that is short of memory calls `torch.cuda.empty_cache()` first.

    The garbage collector is off during a capture: a graph that it would free then makes the capture invalid.
    """

    def __init__(self, function: Callable[[], Any], pool: Any):
        self._graph = torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with _without_garbage_collector(), torch.cuda.stream(side):
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self.out = function()  # recorded, not executed
            finally:
                self._graph.capture_end()
        current.wait_stream(side)

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs:
    """Graphs of functions by key. They share memory, so that one runs after the other."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, CudaGraph | None] = {}
        self._pool: Any = None

    def run(self, key: Hashable, function: Callable[[], T], at_once: bool = False) -> T:
        """Run a function of tensors with fixed addresses; the next call overwrites what it returns.

        The first call runs it as it is, so that everything is compiled; the second captures it, and later ones replay
        it. With `at_once` the first call does both, so that all calls round alike: a second run must write the same.
        """
        if key not in self._graphs:
            self._graphs[key] = None
            with for_capture():
                first = function()
            if not at_once:
                return first
        graph = self._graphs[key]
        if graph is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with for_capture():
                graph = self._graphs[key] = CudaGraph(function, self._pool)
        graph.replay()
        out: T = graph.out
        return out


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def for_capture() -> Iterator[None]:
    """Run a function so that it can be captured: around the capture, and around the call before, which compiles.

    Autocast's cache of cast weights is off: it is freed before a graph is replayed. Both calls need this setting:
    torch.compile guards on it, and a recompilation during a capture fails. `is_for_capture` is true in both, so that
    they run the same kernels.
    """
    enabled, token = torch.is_autocast_cache_enabled(), _for_capture.set(True)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        _for_capture.reset(token)


def is_for_capture() -> bool:
    """Return whether the host can read nothing from the device, because the call is captured, or a later one."""
    return _for_capture.get()
