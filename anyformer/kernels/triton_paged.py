"""Triton kernels of decode steps over a paged KV cache: write new tokens, read whole rows, rotate heads."""

import triton
import triton.language as tl

from anyformer.kernels.triton_kernels import product


@triton.jit
def read_pages(
    q, k, v, table, lengths, out, weight, scale, q_b, q_h, k_g, k_s, v_g, v_s, table_b, out_n,
    groups, shared, span, key_width, value_width,
    PAGE: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Attention of one query to the first `lengths` keys of its row, in pages: a program reads at most `span` of them.

    It writes the weighted means of its values [n, b, h, k_v] and log2 of the sum of their weights [n, b, h]; the latter
    are omitted if one part covers all keys (WHOLE). A loop without branches, so that the loads of later keys are under
    way while a tile is multiplied.
    """
    b, g = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    head = tl.arange(0, ROWS)
    here, x, y, key = head < shared, tl.arange(0, K), tl.arange(0, V), tl.arange(0, KEYS)
    queries = q + b * q_b + (g * shared + head)[:, None] * q_h + x[None]
    asked = tl.load(queries, mask=here[:, None] & (x < key_width)[None], other=0.0)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    share = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, V], tl.float32)
    first = tl.program_id(1) * span
    length = tl.load(lengths + b).to(tl.int32)
    for start in tl.range(first, tl.minimum(first + span, length), KEYS, num_stages=STAGES):
        slot = start + key
        if PAGE >= KEYS:  # a tile is in one page
            at = tl.load(table + b * table_b + start // PAGE) * PAGE + start % PAGE + key
        else:
            at = tl.load(table + b * table_b + slot // PAGE, mask=slot < length, other=0) * PAGE + slot % PAGE
        keys = tl.load(k + g * k_g + at[None] * k_s + x[:, None], mask=(x < key_width)[:, None], other=0.0)
        values = tl.load(v + g * v_g + at[:, None] * v_s + y[None], mask=(y < value_width)[None], other=0.0)
        scores = product(asked, keys, ROWS) * (scale * 1.4426950408889634)  # exp2 from here on
        scores = tl.where((slot < length)[None], scores, -float("inf"))
        high = tl.maximum(most, tl.max(scores, 1))  # finite: the first key of a tile is in the row
        p = tl.exp2(scores - high[:, None])
        shrink = tl.exp2(most - high)
        share = share * shrink + tl.sum(p, 1)
        mean = mean * shrink[:, None] + product(p.to(values.dtype), values, ROWS)
        most = high
    empty = share == 0.0
    share = tl.where(empty, 1.0, share)
    place = tl.program_id(1) * out_n + b * groups * shared + g * shared + head
    wanted = here[:, None] & (y < value_width)[None]
    tl.store(out + place[:, None] * value_width + y[None], (mean / share[:, None]).to(out.dtype.element_ty), wanted)
    if not WHOLE:
        tl.store(weight + place, tl.where(empty, -1e30, most + tl.log2(share)), mask=here)


@triton.jit(do_not_specialize=["t"])  # one compilation for prompts and steps
def write_pages(
    k, v, keys, values, slots, is_token, t, groups, k_b, k_g, k_t, v_b, v_g, v_t, keys_g, values_g,
    key_width, value_width, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write new keys and values [b, g, t, k] of one token to their slot of the pools; zeros if it is padding."""
    token = tl.program_id(0).to(tl.int64)
    b, place = token // t, token % t
    slot, real = tl.load(slots + token), tl.load(is_token + token) != 0
    g, x, y = tl.arange(0, G)[:, None], tl.arange(0, K)[None], tl.arange(0, V)[None]
    inside, within = (g < groups) & (x < key_width), (g < groups) & (y < value_width)
    new = tl.load(k + b * k_b + g * k_g + place * k_t + x, mask=inside & real, other=0.0)
    tl.store(keys + g * keys_g + slot * key_width + x, new.to(keys.dtype.element_ty), mask=inside)
    new = tl.load(v + b * v_b + g * v_g + place * v_t + y, mask=within & real, other=0.0)
    tl.store(values + g * values_g + slot * value_width + y, new.to(values.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["t"])  # one compilation for prompts and steps
def rotate_heads(
    x, cos, sin, out, heads, t, width, x_b, x_h, x_t, angle_b, angle_t, H: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Rotate the halves (a, b) of all heads of one token, [b, h, t, 2 · width], to (a cos - b sin, b cos + a sin)."""
    token = tl.program_id(0).to(tl.int64)
    b, place = token // t, token % t
    h, i = tl.arange(0, H)[:, None], tl.arange(0, HALF)[None]
    there, angle = (h < heads) & (i < width), b * angle_b + place * angle_t + i
    at = x + b * x_b + h * x_h + place * x_t + i
    first, second = tl.load(at, mask=there).to(tl.float32), tl.load(at + width, mask=there).to(tl.float32)
    c, s = tl.load(cos + angle, mask=i < width), tl.load(sin + angle + width, mask=i < width)
    to = out + (token * heads + h) * 2 * width + i
    tl.store(to, (first * c - second * s).to(out.dtype.element_ty), mask=there)
    tl.store(to + width, (second * c + first * s).to(out.dtype.element_ty), mask=there)
