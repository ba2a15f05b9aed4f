"""Chunked linear recurrences by Triton kernels, for a decay per head or none, with and without the delta rule.

In a chunk, with S the state that enters it and (I + A)⁻¹ the inverse of `chunked_recurrence._with_delta_rule`:

    v' = (I + A)⁻¹ r (v - enter · k S)
    o = (q kᵀ · decay) v' + enter · q S
    S ← through · S + (leave · k)ᵀ v'

Without the delta rule v' = v. One kernel inverts the chunks, one passes the state from chunk to chunk and one computes
outputs; only states, v' and the inverses are written to memory. The gradients need no further inverse:
x = (I + A)⁻ᵀ dv' is the gradient of what the inverse is applied to, and that of A is -tril(x v'ᵀ, -1). Equal to
`chunked_recurrence.recur_in_chunks`, which is the reference.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.conventions import next_power_of_two
from anyformer.kernels.linear_recurrence import Recurrence
from anyformer.kernels.private import functorch_is_active
from anyformer.kernels.runtime import HAS_TRITON

CHUNK = 64  # tokens
MAX_KEY_WIDTH = 128  # a program holds whole keys
MIN_TILE = 16  # of a matmul
FULL_GPU = 128  # programs from which on wider parts of a state are passed


def can_fuse_recurrence(x: Recurrence) -> bool:
    """Return whether the kernels can run: bf16, at most one decay per head, and a GPU with their shared memory."""
    if not (HAS_TRITON and x.v.is_cuda and all(y.dtype is torch.bfloat16 for y in x[:3])):
        return False
    known = x.k.shape[3] <= MAX_KEY_WIDTH and (x.log_decay is None or x.log_decay.dim() == 3)
    return known and torch.cuda.get_device_properties(x.v.device).major >= 9 and not functorch_is_active()


def recur_fused(x: Recurrence, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [b, h, t, v] and the last state [b, h, k, v], as `recur` does."""
    missing = -x.v.shape[2] % CHUNK
    runs, total, rate = x.runs, x.log_decay, x.rate
    if runs is not None:
        runs = torch.cat((runs, runs[:, -1:].expand(-1, missing)), dim=1).int()
    if total is not None:
        total = F.pad(total.float(), (0, missing)).unflatten(2, (-1, CHUNK)).cumsum(dim=3).flatten(2)
    if rate is not None:
        rate = F.pad(rate.float(), (0, missing))
    q, k, v = (y.transpose(1, 2) for y in x[:3])
    first = (x.zero_state() if state is None else state).float()
    out, last, *_ = _recur(q, k, v, total, rate, runs, first)
    return out.transpose(1, 2), last


@torch.library.custom_op("anyformer::recur_in_chunks", mutates_args=())
def _recur(
    q: Tensor, k: Tensor, v: Tensor, total: Tensor | None, rate: Tensor | None, runs: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs [b, t, h, v] and last state; states before chunks, inverses and v' for the gradients."""
    from anyformer.kernels import triton_recurrence as kernels

    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    total, rate, runs = (_dense(x) for x in (total, rate, runs))
    out, last, states, inverse, new = _empty_outputs(q, k, v, total, rate, runs, state)
    (b, t, h, width), n, sizes = v.shape, states.shape[2], _sizes(k, v)
    flags = {"DECAY": total is not None, "RUNS": runs is not None, "C": CHUNK, "K": _tile(k.shape[3])}
    delta, spare = rate is not None, state  # a tensor in the place of one that is not there
    g, r, s = (spare if x is None else x for x in (total, rate, runs))
    if delta:
        precise = "ieee" if v.dtype is torch.float32 else "tf32x3"
        kernels.invert_overlap[(n, b * h)](
            k, g, r, s, inverse, t, n, *sizes[:3], **flags, PRECISION=precise, LEVELS=CHUNK.bit_length() - 1
        )
    columns = _state_columns(b * h, width)
    kernels.pass_states[(-(-width // columns), b * h)](
        k, v, g, r, s, inverse, state, states, new, last, t, n, *sizes, **flags, DELTA=delta, V=columns, num_stages=2
    )
    columns = 128 if width % 128 == 0 else min(64, _tile(width))
    kernels.read_states[(-(-width // columns), n, b * h)](
        q, k, new if delta else v, g, s, states, out, t, n, *sizes, **flags, V=columns
    )
    return out, last, states, inverse, new


@_recur.register_fake
def _empty_outputs(
    q: Tensor, k: Tensor, v: Tensor, total: Tensor | None, rate: Tensor | None, runs: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    (b, t, h, width), keys = v.shape, k.shape[3]
    n = -(-t // CHUNK)
    delta = rate is not None
    inverse, new = v.new_empty((b, h, n, CHUNK, CHUNK) if delta else 0), v.new_empty(v.shape if delta else 0)
    return v.new_empty(v.shape), state.new_empty(state.shape), v.new_empty(b, h, n, keys, width), inverse, new


@torch.library.custom_op("anyformer::recur_in_chunks_backward", mutates_args=())
def _recur_backward(
    d_out: Tensor, d_last: Tensor, tokens: list[Tensor], facts: list[Tensor | None], kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q and k for each head of v, v, summed decays, rates and the first state.

    `tokens` are q, k and v; `facts` summed decays, rates and runs; `kept` states, inverses and v' of the forward pass.
    """
    from anyformer.kernels import triton_recurrence as kernels

    (q, k, v), (total, rate, runs) = (x.contiguous() for x in tokens), (_dense(x) for x in facts)
    states, inverse, new = kept
    d_out, d_last = d_out.contiguous(), d_last.contiguous()
    dq, dk, dv, d_total, d_rate, d_state = _empty_gradients(d_out, d_last, tokens, facts, kept)
    (b, t, h, width), n, sizes = v.shape, states.shape[2], _sizes(k, v)
    flags = {"DECAY": total is not None, "RUNS": runs is not None, "C": CHUNK, "K": _tile(k.shape[3])}
    delta, spare = rate is not None, d_last
    g, r, s = (spare if x is None else x for x in (total, rate, runs))
    d_states, d_new = torch.empty_like(states), torch.empty_like(new)
    columns = 128 if width % 128 == 0 else min(64, _tile(width))
    if delta:
        kernels.value_gradients[(-(-width // columns), n, b * h)](
            q, k, d_out, g, s, d_new, t, n, *sizes, **flags, V=columns
        )
    columns = _state_columns(b * h, width)
    kernels.pass_gradients[(-(-width // columns), b * h)](
        q, k, d_out, g, r, s, inverse, d_last, d_states, d_new, d_state, t, n, *sizes,
        **flags, DELTA=delta, V=columns, num_stages=2,
    )  # fmt: skip
    kernels.token_gradients[(n, b * h)](
        q, k, v, new if delta else v, d_out, g, r, s, states, d_states, d_new, dq, dk, dv, d_total, d_rate,
        t, n, *sizes, **flags, DELTA=delta, V=min(64, _tile(width)), num_warps=8, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv, d_total, d_rate, d_state


@_recur_backward.register_fake
def _empty_gradients(
    d_out: Tensor, d_last: Tensor, tokens: list[Tensor], facts: list[Tensor | None], kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (_, k, v), (total, rate, _) = tokens, facts
    keys = (*v.shape[:3], k.shape[3])
    d_total, d_rate = (d_last.new_empty(0 if x is None else x.shape) for x in (total, rate))
    return v.new_empty(keys), v.new_empty(keys), v.new_empty(v.shape), d_total, d_rate, d_last.new_empty(d_last.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[2:])


def _back(ctx: Any, d_out: Tensor | None, d_last: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, total, rate, runs, state, *kept = ctx.saved_tensors
    d_out = torch.zeros_like(v) if d_out is None else d_out
    d_last = torch.zeros_like(state) if d_last is None else d_last
    dq, dk, dv, d_total, d_rate, d_state = _recur_backward(d_out, d_last, [q, k, v], [total, rate, runs], kept)
    if (groups := q.shape[2]) != v.shape[2]:
        dq, dk = (x.unflatten(2, (groups, -1)).sum(dim=3) for x in (dq, dk))
    return dq, dk, dv, None if total is None else d_total, None if rate is None else d_rate, None, d_state


_recur.register_autograd(_back, setup_context=_keep)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _tile(width: int) -> int:
    return max(MIN_TILE, next_power_of_two(width))


def _sizes(k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Return the number of heads, how many share a key, and the widths of keys and values."""
    return v.shape[2], v.shape[2] // k.shape[2], k.shape[3], v.shape[3]


def _state_columns(rows: int, width: int) -> int:
    """Return how many columns of a state a program passes: few where there are few states."""
    return min(_tile(width), 64 if rows * -(-width // 64) >= FULL_GPU else 32)
