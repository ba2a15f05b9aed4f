"""Rows of one call as a linear recurrence reads them: where segments start, what is padding, and what a cache holds.

A recurrence reads real tokens in order. Where padding may be between them, rows are aligned first: padding on the left,
where it changes no state, then the real tokens. So the newest tokens of all rows have the same index.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.cache.states import StateCache
from anyformer.attention.layout import real, segment_starts
from anyformer.kernels.chunked_recurrence import recur_in_chunks
from anyformer.kernels.fused_convolution import can_fuse_convolution, fused_convolution
from anyformer.kernels.linear_recurrence import Recurrence, recur, step
from anyformer.nn.context import Context
from anyformer.nn.state_mixers.short_convolution import ShortConvolution


class StateRows:
    """The tokens of one call, and the state of the cache that they continue."""

    def __init__(self, x: Tensor, ctx: Context):
        layout, (batch, self.length) = ctx.layout, x.shape[:2]
        if layout.whole is not None:
            raise ValueError("a recurrent state passes through whole rows: context parallelism cannot split them")
        self.cache = None if ctx.cache is None else _state_cache(ctx.cache.layer)
        self.recur, self.first = recur if ctx.recurrent.backend == "eager" else recur_in_chunks, ctx.reads_own_tokens
        self.order: Tensor | None = None  # int [b, t]: index of the token at each place of the aligned rows
        self.segments: Tensor | None = None  # these are int [b, t], aligned; None: one run of real tokens in each row
        self.runs: Tensor | None = None  # number of resets up to each token, those before this call included
        if self.cache is None and not layout.packed and layout.padding != "any":
            return  # padding on the right is read after the real tokens, and nothing reads it
        segments = layout.segment_ids.expand(batch, self.length)
        has_gaps = layout.padding == "any" and layout.documents is None
        if self.cache is not None:  # it stores the newest tokens, which padding on the right would follow
            has_gaps = layout.padding != "none"
        if self.length > 1 and has_gaps:
            self.order = real(segments).int().argsort(dim=1, stable=True)
            segments = segments.gather(1, self.order)
        starts = segment_starts(segments, None if self.cache is None else self.cache.segments[:, -1])
        runs = starts.cumsum(dim=1)
        self.segments, self.runs = segments, runs if self.cache is None else runs + self.cache.runs[:, -1:]

    def align(self, x: Tensor) -> Tensor:
        """Return x [b, t, ...] in the order in which it is read."""
        return x if self.order is None else _take(x, self.order)

    def convolve(self, x: Tensor, convolution: ShortConvolution) -> Tensor:
        """Return the convolution of aligned tokens [b, t, c], the tokens in the cache before them."""
        tail, runs = convolution.tail, self.runs
        if self.first and can_fuse_convolution(x):
            if self.cache is not None:
                self.cache.append_inputs(x, self._count(self.length))
            return fused_convolution(x, convolution.weight, convolution.bias, runs)
        if self.cache is None:
            return convolution(F.pad(x, (0, 0, tail, 0)), None if runs is None else F.pad(runs, (tail, 0), value=-1))
        assert runs is not None
        known = self.cache.inputs[:, self.cache.slack :].to(x.dtype)
        both = torch.cat((known, x), dim=1)
        runs = torch.cat((self.cache.runs[:, self.cache.runs.shape[1] - tail :], runs), dim=1)
        if self.order is not None:  # padding comes before the tokens of the cache
            padding = self.length - self._count(self.length)[:, None]
            index = torch.arange(tail + self.length, device=x.device)
            index = torch.where(index < tail + padding, index - padding, index).clamp(min=0)
            both, runs = _take(both, index), runs.gather(1, index)
        self.cache.append_inputs(x, self._count(self.length))
        return convolution(both, runs)

    def run(self, x: Recurrence) -> Tensor:
        """Return the outputs [b, h, t, v] of aligned tokens, in the order of the call, and store the newest states."""
        if self.segments is not None and self.runs is not None:
            x = _without_padding(x, real(self.segments))
            x = x._replace(runs=self.runs if self.cache is None else self.runs - self.cache.runs[:, -1:])
        out = self.recur(x)[0] if self.cache is None else self._run_cached(x, self.cache)
        return self.restore(out)

    def restore(self, x: Tensor) -> Tensor:
        """Return aligned x [b, h, t, v] in the order of the call."""
        return x if self.order is None else _take(x.transpose(1, 2), self.order.argsort(dim=1)).transpose(1, 2)

    def _run_cached(self, x: Recurrence, cache: StateCache) -> Tensor:
        """Read chunks up to the first token whose state is stored, then one token after the other."""
        assert self.segments is not None
        assert self.runs is not None
        assert x.runs is not None
        single = min(self.length, cache.slack + 1) - 1
        chunked = self.length - single
        run = step if chunked == 1 else self.recur
        out, state = run(x.tokens(0, chunked), cache.states[:, -1])
        outs, states = [out], [state]
        for i in range(chunked, self.length):
            token = x.tokens(i, i + 1)
            out, state = step(token._replace(runs=x.runs[:, i : i + 1] - x.runs[:, i - 1 : i]), state)
            outs.append(out)
            states.append(state)
        cache.append_states(torch.stack(states, dim=1), self._count(len(states)))
        cache.append_facts(self.segments, self.runs, self._count(self.length))
        return torch.cat(outs, dim=2)

    def _count(self, last: int) -> Tensor:
        """Return how many of the last tokens of each row are real, [b]."""
        assert self.segments is not None
        return real(self.segments[:, self.length - last :]).sum(dim=1)


def _state_cache(layer: object) -> StateCache:
    assert isinstance(layer, StateCache)
    return layer


def _without_padding(x: Recurrence, is_real: Tensor) -> Recurrence:
    """Return the recurrence in which tokens that are not real [b, t] change no state."""
    where = is_real[:, None, :]
    log_decay, rate = x.log_decay, x.rate
    if log_decay is not None:
        log_decay = log_decay.masked_fill(~(where if log_decay.dim() == 3 else where[..., None]), 0)
    rate = None if rate is None else rate.masked_fill(~where, 0)
    return x._replace(k=x.k.masked_fill(~where[..., None], 0), log_decay=log_decay, rate=rate)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return x [b, n, ...] at `index` [b, m]."""
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))
