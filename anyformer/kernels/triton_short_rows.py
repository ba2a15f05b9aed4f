"""Triton kernels of attention within short rows: scores of some queries with all keys are one tile in registers."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_rows(q, k, v, q_segments, k_segments, seed, out, scale, dropped, keep_factor, t, s, heads, repeat, width,
                q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, q_segment_row, k_segment_row,
                BEFORE: tl.constexpr, AFTER: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
                T: tl.constexpr, S: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Write the attention of T queries of one row and head to `out` [b, t, h, k]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.program_id(2) * T
    i, j, c = first + tl.arange(0, T)[:, None], tl.arange(0, S)[None], tl.arange(0, K)[None]
    x = load_tokens(q + row * q_row + head * q_head, first, q_token, t, width, T, K)
    y = load_tokens(k + row * k_row + head // repeat * k_head, 0, k_token, s, width, S, K)
    z = load_tokens(v + row * v_row + head // repeat * v_head, 0, v_token, s, width, S, K)
    seen = sees(q_segments + row * q_segment_row, k_segments + row * k_segment_row, i, j, t, s, BEFORE, AFTER, SEGMENTS)
    scores = tl.where(seen, tl.dot(x, tl.trans(y)) * (scale * LOG2_E), -float("inf"))
    most = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(most == -float("inf"), 0.0, most)[:, None])
    total = tl.sum(weights, 1)
    if DROPOUT:
        kept = keeps(tl.load(seed), (row.to(tl.int32) * heads + head) * t * s + i * s + j, dropped)
        weights = tl.where(kept, weights * keep_factor, 0.0)
    means = tl.dot(weights.to(z.dtype), z) / tl.where(total == 0.0, 1.0, total)[:, None]
    at = out + ((row * t + i) * heads + head) * width + c
    tl.store(at, means.to(out.dtype.element_ty), mask=(i < t) & (c < width))


@triton.jit
def attend_rows_backward(q, k, v, d_out, q_segments, k_segments, seed, dq, dk, dv, scale, dropped, keep_factor,
                         t, s, groups, repeat, width, q_row, q_head, q_token, k_row, k_head, k_token,
                         v_row, v_head, v_token, d_out_row, d_out_head, d_out_token, q_segment_row, k_segment_row,
                         dq_row, dq_token, dk_row, dk_token,
                         BEFORE: tl.constexpr, AFTER: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr,
                         T: tl.constexpr, S: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Write the gradients of one row and group of heads: dq [b, t, h, k], dk and dv [b, s, g, k], heads side by side.

    Weights are computed again, transposed: then only the gradient of the scores must be transposed, for dq.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, blocks = groups * repeat, tl.cdiv(t, T)
    j, c = tl.arange(0, S)[:, None], tl.arange(0, K)[None]
    y = load_tokens(k + row * k_row + group * k_head, 0, k_token, s, width, S, K)
    z = load_tokens(v + row * v_row + group * v_head, 0, v_token, s, width, S, K)
    d_k = tl.zeros([S, K], tl.float32)
    d_v = tl.zeros([S, K], tl.float32)
    for n in range(repeat * blocks):
        head, first = group * repeat + n // blocks, n % blocks * T
        i = first + tl.arange(0, T)[None]
        seen = sees(
            q_segments + row * q_segment_row, k_segments + row * k_segment_row, i, j, t, s, BEFORE, AFTER, SEGMENTS
        )
        x = load_tokens(q + row * q_row + head * q_head, first, q_token, t, width, T, K)
        d_mean = load_tokens(d_out + row * d_out_row + head * d_out_head, first, d_out_token, t, width, T, K)
        scores = tl.where(seen, tl.dot(y, tl.trans(x)) * (scale * LOG2_E), -float("inf"))  # [s, t]
        most = tl.max(scores, 0)
        weights = tl.exp2(scores - tl.where(most == -float("inf"), 0.0, most)[None])
        total = tl.sum(weights, 0)
        weights = weights * (1 / tl.where(total == 0.0, 1.0, total))[None]
        d_weights = tl.dot(z, tl.trans(d_mean))
        if DROPOUT:
            kept = keeps(tl.load(seed), (row.to(tl.int32) * heads + head) * t * s + i * s + j, dropped)
            d_v += tl.dot(tl.where(kept, weights * keep_factor, 0.0).to(z.dtype), d_mean)
            d_weights = tl.where(kept, d_weights * keep_factor, 0.0)
        else:
            d_v += tl.dot(weights.to(z.dtype), d_mean)
        d_scores = weights * (d_weights - tl.sum(weights * d_weights, 0)[None])
        d_scores = (d_scores * scale).to(x.dtype)
        d_k += tl.dot(d_scores, x)
        found = tl.dot(tl.trans(d_scores), y)
        token = first + tl.arange(0, T)[:, None]
        at = dq + row * dq_row + token * dq_token + head * width + c
        tl.store(at, found.to(dq.dtype.element_ty), mask=(token < t) & (c < width))
    at, there = row * dk_row + j * dk_token + group * width + c, (j < s) & (c < width)
    tl.store(dk + at, d_k.to(dk.dtype.element_ty), mask=there)
    tl.store(dv + at, d_v.to(dv.dtype.element_ty), mask=there)


@triton.jit
def load_tokens(x, first, stride, n, width, N: tl.constexpr, K: tl.constexpr):
    """Return the vectors of N tokens from the first on [N, K], zeros beyond the n tokens of a row and their width."""
    token, column = first + tl.arange(0, N)[:, None], tl.arange(0, K)[None]
    return tl.load(x + token * stride + column, mask=(token < n) & (column < width), other=0.0)


@triton.jit
def sees(q_segments, k_segments, i, j, t, s, BEFORE: tl.constexpr, AFTER: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return whether query i sees key j, in the shape of both together."""
    seen = (i < t) & (j < s)
    if SEGMENTS:
        seen &= tl.load(q_segments + i, mask=i < t, other=0) == tl.load(k_segments + j, mask=j < s, other=0)
    if BEFORE >= 0:
        seen &= i - j <= BEFORE
    if AFTER >= 0:
        seen &= j - i <= AFTER
    return seen


@triton.jit
def keeps(seed, index, dropped):
    """Return whether dropout keeps an element: the hash of `keep_mask` in dropout.py."""
    x = (index ^ seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x & 0x7FFFFFFF).to(tl.int32) >= dropped
