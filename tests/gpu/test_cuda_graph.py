"""Captured functions."""

import gc
import weakref

import torch

from anyformer.kernels.cuda_graph import CudaGraph


def test_garbage_is_not_collected_during_a_capture():
    """A graph that is freed while another is captured makes the capture invalid."""
    x, pool = torch.zeros(4, device="cuda"), torch.cuda.graph_pool_handle()
    x + 1  # loads the kernel
    cycle = [CudaGraph(lambda: x + 1, pool)]
    cycle.append(cycle)  # type: ignore[arg-type]  # only the collector frees it
    freed = weakref.ref(cycle[0])
    del cycle

    def function() -> torch.Tensor:
        kept = [[i] for i in range(100_000)]  # enough objects for a collection
        assert freed() is not None
        return x + len(kept)

    graph = CudaGraph(function, pool)
    assert gc.isenabled()
    graph.replay()
    assert graph.out.tolist() == [100_000.0] * 4
