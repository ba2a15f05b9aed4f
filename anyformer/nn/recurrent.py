"""Recurrent mixers: an RNN, LSTM or GRU in place of self-attention.

Cells and weights are torch's. Rows of one segment without gaps run on torch's fused kernels. Everything else, and the
backend `eager`, runs on the loop in `_steps`, which handles segments, padding and caches. The cache stores the state
after every token, so a row continues from its newest token. torch.compile breaks its graph here, because the fused
kernels are faster than an unrolled loop.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.cache.layer_cache import LayerCache
from anyformer.attention.cache.ring import RowSlots, Slots
from anyformer.attention.layout import Layout, real, sees, segment_starts
from anyformer.config import Recurrent, plain_pattern
from anyformer.kernels.conventions import PADDING
from anyformer.nn.context import Context
from anyformer.nn.linear import Linear, OutBranch

ALL = plain_pattern(ahead=True)  # a constant: torch.compile cannot trace the construction of a spec
CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class RecurrentMixer(OutBranch):
    """out(h_t), or out([h_t ; h'_t]) with a second cell that reads each segment backwards."""

    def __init__(self, spec: Recurrent, width: int):
        super().__init__()
        hidden, directions = spec.hidden(width), 2 if spec.both_ways else 1
        self.cells = nn.ModuleList(CELLS[spec.cell](width, hidden, batch_first=True) for _ in range(directions))
        plain = directions == 1 and hidden == width
        self.out = nn.Identity() if plain else Linear(directions * hidden, width, bias=False)
        self.hidden, self.state = hidden, spec.state(width)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        forward, *backward = (cast(nn.RNNBase, cell) for cell in self.cells)
        state = self._run(forward, x, ctx.layout, ctx)
        read = [state[..., : self.hidden]]
        for cell in backward:
            order = _backwards(ctx.layout)
            segments = None if ctx.layout.segments is None else _take(ctx.layout.segments, order)
            back = self._run(cell, _take(x, order), ctx.layout._replace(segments=segments), ctx)
            read.append(_take(back, order)[..., : self.hidden])
        if ctx.recurrent.sink is not None:
            ctx.recurrent.sink.states = state
        return self.out(ctx.tap("state", torch.cat(read, dim=-1)))

    def _run(self, cell: nn.RNNBase, x: Tensor, layout: Layout, ctx: Context) -> Tensor:
        """Return the state after each token [b, t, h]; without a sink, the fused LSTM returns h alone, without c."""
        start = ctx.recurrent.initial
        is_plain = not layout.packed and layout.padding != "any" and ctx.reads_own_tokens
        needs_c = isinstance(cell, nn.LSTM) and (ctx.recurrent.sink is not None or ctx.cache is not None)
        if is_plain and ctx.recurrent.backend != "eager" and not needs_c and _has_kernel(x, self.training):
            initial = None if start is None else start[None, :, 0].contiguous()
            if initial is not None and isinstance(cell, nn.LSTM):
                states = cell(x, tuple(part.contiguous() for part in initial.chunk(2, dim=-1)))[0]
            else:
                states = cell(x, initial)[0]
        else:
            state, last = x.new_zeros(x.shape[0], self.state), None
            if not ctx.reads_own_tokens:
                state, last = self._newest(ctx)
            states = _steps(cell, x, layout, state, last, start)
        if ctx.cache is not None:
            h, c = states[:, None].tensor_split([self.hidden], dim=-1)  # [b, 1, t, h]
            ctx.append(h, c)
        return states

    def _newest(self, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return state [b, h] and segment [b] of each row's newest real token before the tokens at hand."""
        assert ctx.cache is not None
        assert isinstance(ctx.cache.write_at, Slots | RowSlots)
        assert isinstance(ctx.cache.layer, LayerCache)
        assert ctx.keys.segments is not None
        index = torch.arange(ctx.keys.segments.shape[1], device=ctx.keys.segments.device)
        first = ctx.cache.write_at.at.amin(dim=-1, keepdim=True)  # [1] or [b, 1]
        known = real(ctx.keys.segments) & (index < first)
        newest = torch.where(known, index, 0).max(dim=1, keepdim=True).values
        segment = torch.where(known.any(dim=1), ctx.keys.segments.gather(1, newest)[:, 0], PADDING)
        stored = [
            _take(store.read()[:, 0], newest)[:, 0] for store in (ctx.cache.layer.keys, ctx.cache.layer.values)
        ]  # h, c
        return torch.cat(stored, dim=-1), segment


def _has_kernel(x: Tensor, training: bool) -> bool:
    if x.is_cuda:
        return training or not torch.is_grad_enabled()  # cuDNN has a backward pass in training mode only
    return x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(x.device.type)


def _steps(
    cell: nn.RNNBase, x: Tensor, layout: Layout, state: Tensor, last: Tensor | None, initial: Tensor | None
) -> Tensor:
    """Return the state after each token [b, t, h], by the definition.

    A first token of segment `last` [b] continues from `state` [b, h]. Where another segment starts, the state is
    `initial` [b, t, h], or zero.
    """
    weights = {name.removesuffix("_l0"): parameter for name, parameter in cell.named_parameters()}
    inputs = F.linear(x, weights["weight_ih"], weights["bias_ih"])  # of all tokens at once
    is_real = None if layout.segments is None else real(layout.segments)
    starts = _starts(layout, x, last)
    state, states = state.to(inputs.dtype), []
    for t in range(x.shape[1]):
        if t == 0 or is_real is not None:
            state = torch.where(starts[:, t, None], 0.0 if initial is None else initial[:, t].to(state.dtype), state)
        h = state[:, : cell.hidden_size]
        new = _step(cell, inputs[:, t], F.linear(h, weights["weight_hh"], weights["bias_hh"]), state)
        state = new if is_real is None else torch.where(is_real[:, t, None], new, state)
        states.append(state)
    return torch.stack(states, dim=1)


def _step(cell: nn.RNNBase, x: Tensor, u: Tensor, state: Tensor) -> Tensor:
    """Return the next state from W x_t + b, U h_{t-1} + b' and the previous state."""
    match cell:
        case nn.LSTM():
            _, c = state.chunk(2, dim=-1)
            i, f, g, o = (x + u).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            return torch.cat((o.sigmoid() * c.tanh(), c), dim=-1)
        case nn.GRU():
            (x_r, x_z, x_n), (u_r, u_z, u_n) = x.chunk(3, dim=-1), u.chunk(3, dim=-1)
            r, z = (x_r + u_r).sigmoid(), (x_z + u_z).sigmoid()
            return (1 - z) * (x_n + r * u_n).tanh() + z * state
        case _:
            return (x + u).tanh()


def _starts(layout: Layout, x: Tensor, last: Tensor | None) -> Tensor:
    """Return which real tokens are in another segment than the real token before them, bool [b or 1, t]."""
    index = torch.arange(x.shape[1], device=x.device)
    if layout.segments is None:
        return (index == 0)[None]
    return segment_starts(layout.segments.expand(x.shape[:2]), last)


def _backwards(layout: Layout) -> Tensor:
    """Return the order [b or 1, t] that reverses rows, and restores them if applied twice; right padding stays."""
    length = layout.positions.shape[1]
    index = torch.arange(length, device=layout.positions.device)[None]
    if layout.segments is None or layout.packed or layout.padding == "any":
        return index.flip(1)
    return (real(layout.segments).sum(dim=1, keepdim=True) - 1 - index) % length


def last_states(states: Tensor, q: Layout, source: Layout) -> Tensor:
    """Return for each token the state [b, t, h] after the last source token of its segment, or zero."""
    index = torch.arange(states.shape[1], device=states.device)
    last = torch.where(sees(ALL, q, source), index, -1).max(dim=-1).values  # [b or 1, t]
    return _take(states, last.clamp(min=0)) * (last >= 0)[..., None]


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Return x [b, t, ...] at `index` [b or 1, t']."""
    index = index.expand(x.shape[0], -1)
    return x.gather(1, index if x.dim() == 2 else index[..., None].expand(*index.shape, x.shape[2]))
