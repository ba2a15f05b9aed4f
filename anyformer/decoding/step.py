"""One decode step: shapes that never change, no question to the device, so that it is compiled or captured once.

On a GPU the first step runs as it is, the second is captured as a CUDA graph, and all others replay it: what costs time
there is not the arithmetic but the starting of hundreds of small kernels.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from anyformer.nn.cache import Cache
from anyformer.nn.mask import Layout
from anyformer.nn.model import Transformer


def step(
    model: Transformer, cache: Cache, new: Tensor, there: Tensor | None, bound: int | None = None
) -> tuple[Tensor, Tensor]:
    """Reads [rows, n] more tokens, those that are `there`: their hidden states [rows, n, d], and the logits of what
    follows each of them [rows, n, v]."""
    hidden = model.decode(new, segments=cache.next(new.shape[1], there, bound), cache=cache)
    return hidden, logits(model, cache, hidden)


def logits(model: Transformer, cache: Cache, hidden: Tensor) -> Tensor:
    return model.apply_head(hidden, Layout(cache.following[:, None].expand(hidden.shape[:2])))


@cache
def compiled_step() -> Callable[..., tuple[Tensor, Tensor]]:
    """One for all, so that what was compiled is found again; made when asked for, as importing compilers takes long."""
    return torch.compile(step)


class Stepper:
    """Runs the steps of one cache. On a GPU what it returns is written over by the next step."""

    def __init__(self, model: Transformer, cache: Cache, *, compile: bool = False):
        assert model.decoder is not None
        self.model, self.cache, self.compile = model, cache, compile
        self.limit = min((limit for limit, _ in model.decoder.ends), default=None)
        self.warm = False
        self.graph: Graph | None = None

    def __call__(self, new: Tensor, there: Tensor | None, bound: int) -> tuple[Tensor, Tensor]:
        """`bound`: what the positions of the new tokens are below."""
        if new.shape[1] > 1 or (self.limit is not None and bound > self.limit):  # the model itself has to look
            return step(self.model, self.cache, new, there, bound)
        if not self.cache.length.is_cuda:
            return self._run(new, there, bound)
        if there is None:
            there = torch.ones_like(new, dtype=torch.bool)
        if not self.warm:
            self.warm = True
            return self._run(new, there, bound)
        self.cache.reserve(1)
        if self.graph is None:
            self.graph = Graph(self._body, new, there)
        return self.graph.replay(new, there)

    def _run(self, new: Tensor, there: Tensor | None, bound: int) -> tuple[Tensor, Tensor]:
        if not self.compile:
            return step(self.model, self.cache, new, there, bound)
        self.cache.reserve(1)
        return compiled_step()(self.model, self.cache, new, there)

    def _body(self, new: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """What a graph holds: nothing of it looks at a bound."""
        if self.compile:
            return compiled_step()(self.model, self.cache, new, there)
        return step(self.model, self.cache, new, there, bound=0)


class Graph:
    """A function's kernels on a GPU, to be run again with other numbers in the same places."""

    def __init__(self, function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], new: Tensor, there: Tensor):
        self.new, self.there = new.clone(), there.clone()
        self.graph = torch.cuda.CUDAGraph()
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # not by torch.cuda.graph, which empties the allocator's cache every time
            self.graph.capture_begin(capture_error_mode="thread_local")
            self.out = function(self.new, self.there)  # written down, not run
            self.graph.capture_end()
        here.wait_stream(aside)

    def replay(self, new: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        self.new.copy_(new)
        self.there.copy_(there)
        self.graph.replay()
        return self.out
