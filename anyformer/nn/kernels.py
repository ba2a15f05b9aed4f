"""Kernels of our own, in Triton, which a torch with CUDA has: imported where they run."""

import triton
import triton.language as tl


@triton.jit
def descend(logits, labels, losses, stride, v, smoothing, BLOCK: tl.constexpr):
    """Of each row its cross-entropy, and over the logits themselves the gradient of the sum.

    A row is read twice, the second time out of the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    here = logits + row * stride
    most = -float("inf")
    share = 0.0
    total = 0.0
    for start in range(0, v, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(here + at, mask=at < v, other=-float("inf")).to(tl.float32)
        high = tl.maximum(most, tl.max(x, 0))
        share = share * tl.exp(most - high) + tl.sum(tl.exp(x - high), 0)
        total += tl.sum(tl.where(at < v, x, 0.0), 0)
        most = high
    asked = label >= 0
    right = tl.load(here + tl.where(asked, label, 0)).to(tl.float32)
    weight = most + tl.log(share)
    loss = weight - (1 - smoothing) * right - smoothing * total / v
    tl.store(losses + row, tl.where(asked, loss, 0.0))
    for start in range(0, v, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(here + at, mask=at < v, other=-float("inf")).to(tl.float32)
        slope = tl.exp(x - weight) - smoothing / v - tl.where(at == label, 1 - smoothing, 0.0)
        tl.store(here + at, tl.where(asked, slope, 0.0).to(logits.dtype.element_ty), mask=at < v)


@triton.jit
def read_cache(
    q, k, v, mask, bias, out, weight, scale,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, mask_b, mask_t, mask_s, bias_b, bias_h, bias_t, bias_s, out_n,
    groups, shared, t, s, span, key_width, value_width,
    MASKED: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Attention of few queries to many keys: a program reads `span` keys of one group, for all the heads they serve.

    What it leaves are the means of its values [n, b, t, h, k_v], and log2 of the sum of their weights [n, b, t, h].
    """
    b, g = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    here, head, token = row < shared * t, g * shared + row // t, row % t
    x, y = tl.arange(0, K), tl.arange(0, V)
    queries = q + b * q_b + head[:, None] * q_h + token[:, None] * q_t + x[None]
    asked = tl.load(queries, mask=here[:, None] & (x < key_width)[None], other=0.0)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    share = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, V], tl.float32)
    first = tl.program_id(1) * span
    for start in range(first, tl.minimum(first + span, s), KEYS):
        slot = start + tl.arange(0, KEYS)
        seen = here[:, None] & (slot < s)[None]
        if MASKED:
            visible = mask + b * mask_b + token[:, None] * mask_t + slot[None] * mask_s
            seen = seen & (tl.load(visible, mask=seen, other=0) != 0)
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:  # empty slots are not read
            there = (slot < s)[None] & (x < key_width)[:, None]
            keys = tl.load(k + b * k_b + g * k_g + slot[None] * k_s + x[:, None], mask=there, other=0.0)
            inside = (slot < s)[:, None] & (y < value_width)[None]
            values = tl.load(v + b * v_b + g * v_g + slot[:, None] * v_s + y[None], mask=inside, other=0.0)
            scores = tl.dot(asked, keys, input_precision="ieee") * scale
            if BIASED:
                added = bias + b * bias_b + head[:, None] * bias_h + token[:, None] * bias_t + slot[None] * bias_s
                scores += tl.load(added, mask=seen, other=0.0).to(tl.float32)
            scores = tl.where(seen, scores * 1.4426950408889634, -float("inf"))  # exp2 from here on
            high = tl.maximum(most, tl.max(scores, 1))
            level = tl.where(high == -float("inf"), 0.0, high)
            p = tl.exp2(scores - level[:, None])
            shrink = tl.exp2(most - level)
            share = share * shrink + tl.sum(p, 1)
            mean = mean * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
            most = high
    mean = mean / tl.where(share == 0.0, 1.0, share)[:, None]
    place = tl.program_id(1) * out_n + (b * t + token) * groups * shared + head
    at = out + place[:, None] * value_width + y[None]
    tl.store(at, mean.to(out.dtype.element_ty), mask=here[:, None] & (y < value_width)[None])
    tl.store(weight + place, tl.where(share == 0.0, -1e30, most + tl.log2(share)), mask=here)
