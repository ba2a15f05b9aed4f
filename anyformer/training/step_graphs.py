"""Work on a GPU that comes again in the same shapes: recorded once, and from then on started as one (a CUDA graph).

A step of training starts a thousand kernels, and a fast GPU is done with each before the host has started the next.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from anyformer.data.batch import to_device

AFTER = 2  # times that shapes were seen before they are recorded: what is compiled or made once is there by then
MOST = 8  # recordings: each holds what its work needs between two kernels of it

Work = Callable[[Any], Tensor]


class Recorder:
    """Does work whose inputs are on the host: trees of tensors and facts. Nothing but the tensors' values may change
    what a work does with the same facts and shapes, and what it gives is to be read before the next."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seen: Counter[Any] = Counter()
        self.recordings: dict[Any, Recording] = {}
        self.pool: Any = None  # of memory, which recordings share: one is played at a time

    def do(self, work: Work, inputs: Any) -> Tensor:
        leaves, tree = tree_flatten(inputs)
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        if key not in self.recordings:
            self.seen[key] += 1
            here = [to_device(x, self.device) if isinstance(x, Tensor) else x for x in leaves]
            if self.seen[key] <= AFTER or len(self.recordings) == MOST:
                return work(tree_unflatten(here, tree))
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.recordings[key] = Recording(work, here, tree, self.pool)
        return self.recordings[key].play(leaves)


class Recording:
    """A work, recorded; it reads its inputs where they were."""

    def __init__(self, work: Work, inputs: list[Any], tree: TreeSpec, pool: Any):
        self.inputs, self.graph = inputs, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.out = work(tree_unflatten(inputs, tree))

    def play(self, inputs: list[Any]) -> Tensor:
        for own, x in zip(self.inputs, inputs, strict=True):
            if isinstance(x, Tensor):
                own.copy_(x.pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.out
