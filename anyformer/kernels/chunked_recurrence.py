"""Linear recurrences in chunks of tokens: matmuls within a chunk, and one state from chunk to chunk.

Within a chunk, outputs are masked attention with decays as weights (Hua et al. 2022; Dao & Gu 2024). The delta rule
first solves a triangular system in each chunk (Yang et al. 2024), whose solution replaces v. From chunk to chunk the
state changes by an affine map. These maps are composed in groups, all groups at once, so that T tokens take about
2·sqrt(T / chunk) dependent steps rather than T / chunk. Everything is a matmul or elementwise, in torch, with torch's
gradients. Equal to `linear_recurrence.recur`. On a GPU, `fused_recurrence.py` does the same by fewer kernels.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.fused_recurrence import can_fuse_recurrence, recur_fused
from anyformer.kernels.linear_recurrence import Recurrence
from anyformer.kernels.runtime import at_least_fp32

CHUNK = 128  # tokens: larger chunks have fewer states, and more work within them
DELTA_CHUNK = 64  # its triangular systems are as large as a chunk; with wider keys, twice as many tokens
CHANNEL_CHUNK, CHANNEL_PART = 64, 32  # with a decay per channel
MIN_LOG_DECAY = -5.0  # of a decay per channel, per token: exp(half a part · 5) does not overflow
MAX_SEQUENTIAL = 16  # chunks that are passed one after the other, without groups


class Visible(NamedTuple):
    """Which tokens of a chunk meet, by the runs of their states; None: a state is never reset."""

    pairs: Tensor  # bool [b or 1, 1, n, c, c]: the query is at or after the key, in the same run
    enter: Tensor | None  # bool [b, 1, n, c]: reads the state that enters the chunk
    leave: Tensor | None  # bool [b, 1, n, c]: is in the state that leaves the chunk
    through: Tensor | None  # bool [b, 1, n]: the state that enters is in the one that leaves


def recur_in_chunks(x: Recurrence, state: Tensor | None = None, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, h, t, v] and the last state [b, h, k, v], as `recur` does.

    `size` is the number of tokens of a chunk; None: what suits the recurrence and the device.
    """
    if size is None and can_fuse_recurrence(x):
        return recur_fused(x, state)
    length, per_channel = x.v.shape[2], x.log_decay is not None and x.log_decay.dim() == 4
    state = x.zero_state() if state is None else state
    if size is None:
        delta = DELTA_CHUNK * (2 if x.k.shape[3] > DELTA_CHUNK else 1)  # a state is as large as a chunk
        size = CHANNEL_CHUNK if per_channel else CHUNK if x.rate is None else delta
    size = min(size, length)
    size = -(-size // CHANNEL_PART) * CHANNEL_PART if per_channel else size
    dtype = torch.float32 if x.v.dtype is torch.float16 else x.v.dtype  # sums of many tokens overflow fp16
    with torch.autocast(x.v.device.type, enabled=False):
        q, k, v = (y.to(dtype) for y in x[:3])
        # not by `_replace`: after a graph break torch 2.11 rebuilds its result without fields
        chunks = _split(Recurrence(q, k, v, x.log_decay, x.rate, x.runs), size)
        visible = _visible(chunks.runs, size, v.device)
        run = _with_channel_decay if per_channel else _with_head_decay if x.rate is None else _with_delta_rule
        out, state = run(chunks, visible, state)
    return out.flatten(2, 3)[:, :, :length].to(x.v.dtype), state


def _split(x: Recurrence, size: int) -> Recurrence:
    """Return tensors [b, h, n, c, ...], filled up with tokens that change no state."""
    missing = -x.v.shape[2] % size

    def chunked(y: Tensor) -> Tensor:
        y = F.pad(y, (0, 0) * (y.dim() - 3) + (0, missing)) if missing else y
        return y.unflatten(2, (-1, size))

    runs = x.runs
    if runs is not None:
        runs = torch.cat((runs, runs[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (-1, size))
    q, k, v = (chunked(y) for y in x[:3])
    log_decay, rate = (None if y is None else chunked(at_least_fp32(y)) for y in (x.log_decay, x.rate))
    return Recurrence(q, k, v, log_decay, rate, runs)


def _visible(runs: Tensor | None, size: int, device: torch.device) -> Visible:
    pairs = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if runs is None:
        return Visible(pairs[None, None, None], None, None, None)
    last = runs[:, :, -1]  # [b, n]
    before = F.pad(last, (1, -1))  # the run of the state that enters; 0: the given one
    same = runs[:, :, :, None] == runs[:, :, None, :]
    enter, leave, through = runs == before[..., None], runs == last[..., None], last == before
    return Visible((pairs & same)[:, None], enter[:, None], leave[:, None], through[:, None])


# -- within a chunk ---------------------------------------------------------------------------------------------------


def _with_head_decay(x: Recurrence, visible: Visible, state: Tensor) -> tuple[Tensor, Tensor]:
    """One decay per head, or none: q kᵀ is computed once for the heads that share q and k."""
    q, k, v, log_decay, _, _ = x
    g, heads, dtype = q.shape[1], v.shape[1], v.dtype
    decay = _head_decay(log_decay, visible, dtype)

    def grouped(y: Tensor) -> Tensor:
        """[b, h or 1, ...] -> [b, g or 1, r or 1, ...]"""
        return y.unflatten(1, (g, -1) if y.shape[1] == heads else (1, 1))

    scores = (q @ k.transpose(-1, -2))[:, :, None]  # [b, g, 1, n, c, c]
    inside = (scores * grouped(decay.pairs)).to(dtype) @ grouped(v)
    values = (grouped(v) * grouped(decay.leave)[..., None]).to(dtype)
    columns = values.permute(0, 1, 3, 4, 2, 5)  # [b, g, n, c, r, v]
    updates = at_least_fp32(k.transpose(-1, -2) @ columns.flatten(-2)).unflatten(-1, columns.shape[-2:])
    through = grouped(decay.through).transpose(2, 3)[:, :, :, None, :, None]  # [b, g, n, 1, r, 1]
    first = state.unflatten(1, (g, -1)).transpose(2, 3)  # [b, g, k, r, v]
    states, last = pass_states(torch.mul, through, updates, first)
    across = (q @ states.flatten(-2).to(dtype)).unflatten(-1, columns.shape[-2:])  # [b, g, n, c, r, v]
    out = inside + (across.permute(0, 1, 4, 2, 3, 5) * grouped(decay.enter)[..., None]).to(dtype)
    return out.flatten(1, 2), last.transpose(2, 3).flatten(1, 2)


def _with_delta_rule(x: Recurrence, visible: Visible, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule with one decay per head, or none."""
    q, k, v, log_decay, rate, _ = x.expanded()
    assert rate is not None
    dtype, keys = v.dtype, k.transpose(-1, -2)
    decay = _head_decay(log_decay, visible, dtype)
    overlap = at_least_fp32((k @ keys) * decay.pairs) * rate[..., None]
    values = v * rate[..., None].to(dtype)
    entering = k * (rate * decay.enter)[..., None].to(dtype)
    leaving = (k * decay.leave[..., None]).to(dtype).transpose(-1, -2)  # [b, h, n, k, c]
    new, states, last = _replaced_values(
        overlap, values, entering, leaving=leaving, through=decay.through[..., None, None], state=state
    )
    inside = ((q @ keys) * decay.pairs).to(dtype) @ new
    return inside + ((q @ states) * decay.enter[..., None]).to(dtype), last


def _replaced_values(
    overlap: Tensor, values: Tensor, entering: Tensor, *, leaving: Tensor, through: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return v' = u - w S, which replaces v, the states before each chunk, and the last one.

    (I + tril(overlap)) [u, w] = [values, entering], where overlap is r k kᵀ · decay, and these are r v and r k · decay.
    """
    dtype = values.dtype
    solved = invert_unit_lower(overlap.tril(-1)).to(dtype)
    u, w = solved @ values, solved @ entering
    eye = torch.eye(entering.shape[-1], device=entering.device, dtype=through.dtype)
    maps = torch.addcmul(-at_least_fp32(leaving @ w), through, eye)
    states, last = pass_states(torch.matmul, maps, at_least_fp32(leaving @ u), state)
    states = states.to(dtype)
    return u - w @ states, states, last


def _with_channel_decay(x: Recurrence, visible: Visible, state: Tensor) -> tuple[Tensor, Tensor]:
    """One decay per key channel (GLA, Yang et al. 2024), with or without the delta rule (Kimi Linear 2025)."""
    q, k, v, log_decay, rate, _ = x.expanded()
    assert log_decay is not None
    dtype = v.dtype
    total = log_decay.cumsum(dim=3)  # G [b, h, n, c, k]
    inside = _channel_weights(q, k, total).masked_fill(~visible.pairs, 0)
    end = total[:, :, :, -1:]
    enter, leaving, through = total.exp(), k * (end - total).exp(), end.transpose(-1, -2).exp()
    if visible.enter is not None and visible.leave is not None and visible.through is not None:
        enter, leaving = enter * visible.enter[..., None], leaving * visible.leave[..., None]
        through = through * visible.through[..., None, None]
    leaving = leaving.to(dtype).transpose(-1, -2)  # [b, h, n, k, c]
    if rate is None:
        states, last = pass_states(torch.mul, through, at_least_fp32(leaving @ v), state)
    else:
        overlap = at_least_fp32(_channel_weights(k, k, total).masked_fill(~visible.pairs, 0)) * rate[..., None]
        values, entering = v * rate[..., None].to(dtype), (k * enter * rate[..., None]).to(dtype)
        v, states, last = _replaced_values(overlap, values, entering, leaving=leaving, through=through, state=state)
    return inside @ v + (q * enter).to(dtype) @ states.to(dtype), last


def _channel_weights(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return q_i · (k_j exp(G_i - G_j)) of the tokens of a chunk [b, h, n, c, c], G being the summed log decays.

    Queries and keys are scaled apart, relative to G in the middle of the query's part of the chunk: then no factor is
    above exp(5 · part / 2).
    """
    dtype, part = q.dtype, CHANNEL_PART
    middle = total[:, :, :, part // 2 :: part]  # [b, h, n, parts, k]
    queries = q.unflatten(3, (-1, part)) * (total.unflatten(3, (-1, part)) - middle[..., None, :]).exp()
    limit = -MIN_LOG_DECAY * (part // 2 + 1)  # only later keys, which no query sees, are above it
    keys = k[:, :, :, None] * (middle[..., None, :] - total[:, :, :, None]).clamp(max=limit).exp()
    return (queries.to(dtype) @ keys.to(dtype).transpose(-1, -2)).flatten(3, 4)


class HeadDecay(NamedTuple):
    """Decays of one factor per head, 0 where nothing is seen; [b or 1, h or 1, n, ...]. `through` is fp32 at least."""

    pairs: Tensor  # [..., c, c]: from the key to the query
    enter: Tensor  # [..., c]: from the start of the chunk to the token
    leave: Tensor  # [..., c]: from the token to the end of the chunk
    through: Tensor  # [...]: from start to end


def _head_decay(log_decay: Tensor | None, visible: Visible, dtype: torch.dtype) -> HeadDecay:
    if log_decay is None:
        pairs = visible.pairs.to(dtype)
        ones = pairs.new_ones(1, 1, 1, pairs.shape[-1])
        whole = HeadDecay(pairs, ones, ones, at_least_fp32(ones[..., 0]))
    else:
        total = log_decay.cumsum(dim=3)  # G [b, h, n, c]
        distance = total[..., :, None] - total[..., None, :]
        pairs = distance.masked_fill_(~visible.pairs, -math.inf).exp().to(dtype)
        end = total[..., -1:]
        whole = HeadDecay(pairs, total.exp().to(dtype), (end - total).exp().to(dtype), end[..., 0].exp())
    if visible.enter is None or visible.leave is None or visible.through is None:
        return whole
    enter, leave = whole.enter * visible.enter, whole.leave * visible.leave
    return HeadDecay(whole.pairs, enter, leave, whole.through * visible.through)


def invert_unit_lower(lower: Tensor) -> Tensor:
    """Return (I + L)⁻¹ for strictly lower triangular L [..., c, c].

    Inverses of blocks on the diagonal are joined in pairs: the new corner is -D⁻¹ C A⁻¹, for all pairs in two matmuls.
    A Newton step at the end carries the gradient, so that no matmul before it is kept.
    """
    size = lower.shape[-1]
    index = torch.arange(size, device=lower.device)
    eye = torch.eye(size, device=lower.device, dtype=lower.dtype)
    found = eye.expand_as(lower)
    with torch.no_grad():
        width = 1
        while width < size:
            block, pair = index // width, index // (2 * width)
            corner = (pair[:, None] == pair) & (block[:, None] != block)
            joined = lower.masked_fill(~corner, 0)
            found = found - (joined if width == 1 else found @ joined @ found)
            width *= 2
    return found @ (2 * eye - found - lower @ found)


# -- from chunk to chunk ----------------------------------------------------------------------------------------------


def pass_states(
    apply: Callable[[Tensor, Tensor], Tensor], maps: Tensor, updates: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk [b, h, n, ...] and the one after the last, where S ← apply(map, S) + update.

    `apply` is a product, elementwise or of matrices, and also composes two maps [b, h, n, ...].
    """
    n = updates.shape[2]
    maps = maps.expand(-1, -1, n, *maps.shape[3:])
    if n <= MAX_SEQUENTIAL:
        return _pass_in_order(apply, maps.unbind(2), updates.unbind(2), state)
    size = math.ceil(math.sqrt(n))
    whole = n // size * size
    groups, rest = (x[:, :, :whole].unflatten(2, (-1, size)) for x in (maps, updates)), slice(whole, n)
    each_map, each_update = (x.unbind(3) for x in groups)  # [b, h, groups, ...], chunk by chunk of all groups
    composed, local = [each_map[0]], [each_update[0]]
    for one, update in zip(each_map[1:], each_update[1:], strict=True):
        composed.append(apply(one, composed[-1]))
        local.append(apply(one, local[-1]) + update)
    first, state = _pass_in_order(apply, composed[-1].unbind(2), local[-1].unbind(2), state)
    inner = apply(torch.stack(composed[:-1], dim=3), first[:, :, :, None]) + torch.stack(local[:-1], dim=3)
    states = torch.cat((first[:, :, :, None], inner), dim=3).flatten(2, 3)
    if whole == n:
        return states, state
    more, state = _pass_in_order(apply, maps[:, :, rest].unbind(2), updates[:, :, rest].unbind(2), state)
    return torch.cat((states, more), dim=2), state


def _pass_in_order(
    apply: Callable[[Tensor, Tensor], Tensor], maps: tuple[Tensor, ...], updates: tuple[Tensor, ...], state: Tensor
) -> tuple[Tensor, Tensor]:
    states = []
    for one, update in zip(maps, updates, strict=True):
        states.append(state)
        state = apply(one, state) + update
    return torch.stack(states, dim=2), state
