"""Triton kernels. CUDA builds of torch include Triton; this module is imported only where they run."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# EARLY: programmatic dependent launch. A kernel starts before the previous one has ended, and waits for its writes.
# Only then it lets the next kernel start, which thus sees all earlier writes: kernels of a compiled model rely on this.


@triton.jit
def descend(logits, labels, losses, stride, v, smoothing, SMOOTH: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr):
    """Compute the cross-entropy of each row, and overwrite the logits with the gradient of the sum.

    A row is read twice, the second time from cache. Each of the WIDE lanes accumulates a separate sum; these
    are reduced once, at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    asked = label >= 0
    here = logits + row * stride
    right = tl.load(here + tl.where(asked, label, 0)).to(tl.float32)  # before any thread writes a gradient over it
    place = tl.arange(0, DEEP)[:, None] * WIDE + tl.arange(0, WIDE)[None]
    most = tl.full([WIDE], -float("inf"), tl.float32)
    share = tl.zeros([WIDE], tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    for start in range(0, v, DEEP * WIDE):
        at = start + place
        x = tl.load(here + at, mask=at < v, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
        if SMOOTH:
            total += tl.sum(tl.where(at < v, x, 0.0), 0)
        x *= 1.4426950408889634  # exp2 from here on
        high = tl.maximum(most, tl.max(x, 0))
        level = tl.where(high == -float("inf"), 0.0, high)
        share = share * tl.exp2(most - level) + tl.sum(tl.exp2(x - level[None]), 0)
        most = high
    top = tl.max(most, 0)
    weight = top + tl.log2(tl.sum(share * tl.exp2(most - top), 0))
    loss = weight * 0.6931471805599453 - (1 - smoothing) * right
    if SMOOTH:
        loss -= smoothing * tl.sum(total, 0) / v
    tl.store(losses + row, tl.where(asked, loss, 0.0))
    for start in range(0, v, DEEP * WIDE):
        at = start + place
        x = tl.load(here + at, mask=at < v, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        slope = tl.exp2(x * 1.4426950408889634 - weight)
        if SMOOTH:
            slope -= smoothing / v
        slope = tl.where(at == label, slope - (1 - smoothing), slope)
        slope = tl.where(asked, slope, 0.0).to(logits.dtype.element_ty)
        tl.store(here + at, slope, mask=at < v, cache_modifier=".cs")


@triton.jit
def pass_slopes(x, made, out, sums, m, n, ACT: tl.constexpr, TALL: tl.constexpr, STEP: tl.constexpr,
                WIDE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Multiply gradients x [m, n] by the derivative of an activation at `made`, and sum each TALL rows."""
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None]
    total = tl.zeros([STEP, WIDE], tl.float32)
    for start in tl.range(0, TALL, STEP, num_stages=STAGES):
        row = tl.program_id(0).to(tl.int64) * TALL + start + tl.arange(0, STEP)[:, None]
        at, there = row * n + column, (row < m) & (column < n)
        dy = gradient(x + at, made + at, there, ACT)
        tl.store(out + at, dy.to(out.dtype.element_ty), mask=there)
        total += dy
    tl.store(sums + tl.program_id(0) * n + column, tl.sum(total, 0)[None], mask=column < n)


@triton.jit
def join_parts_and_sum(first, second, third, out, sums, m, row_1, row_2, row_3, n_1, n_2, n_3, TALL: tl.constexpr,
                       STEP: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Write up to three matrices [m, n_i], of row strides row_i, side by side, and sum each TALL rows of a column."""
    block, source, stride, width, start_column = tl.program_id(1), first, row_1, n_1, 0
    blocks_1, blocks_2 = tl.cdiv(n_1, WIDE), tl.cdiv(n_2, WIDE)
    if block >= blocks_1 + blocks_2:
        block, source, stride, width = block - blocks_1 - blocks_2, third, row_3, n_3
        start_column = n_1 + n_2
    elif block >= blocks_1:
        block, source, stride, width, start_column = block - blocks_1, second, row_2, n_2, n_1
    column, n = block * WIDE + tl.arange(0, WIDE)[None], n_1 + n_2 + n_3
    total = tl.zeros([STEP, WIDE], tl.float32)
    for start in tl.range(0, TALL, STEP, num_stages=STAGES):
        row = tl.program_id(0).to(tl.int64) * TALL + start + tl.arange(0, STEP)[:, None]
        there = (row < m) & (column < width)
        part = tl.load(source + row * stride + column, mask=there, other=0.0)
        tl.store(out + row * n + start_column + column, part, mask=there)
        total += part.to(tl.float32)
    tl.store(sums + tl.program_id(0) * n + start_column + column, tl.sum(total, 0)[None], mask=column < width)


@triton.jit
def cast_slopes(x, made, out, narrow, scales, sums, m, smallest, largest, N: tl.constexpr, ACT: tl.constexpr,
                TALL: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Do the same as `pass_slopes` one row at a time, and also store the row in fp8 with its scale.

    A row has WIDE columns and up to REST more: one power of two for both would leave many threads idle.
    """
    total = tl.zeros([WIDE], tl.float32)
    total_rest = tl.zeros([REST], tl.float32)
    first, last = tl.arange(0, WIDE), WIDE + tl.arange(0, REST)
    for start in tl.range(0, TALL, num_stages=STAGES):
        row = tl.program_id(0).to(tl.int64) * TALL + start
        at, here, rest = row * N, (row < m) & (first < N), (row < m) & (last < N)
        dy = gradient(x + at + first, made + at + first, here, ACT)
        dy_rest = gradient(x + at + last, made + at + last, rest, ACT)
        tl.store(out + at + first, dy.to(out.dtype.element_ty), mask=here)
        tl.store(out + at + last, dy_rest.to(out.dtype.element_ty), mask=rest)
        most = tl.maximum(tl.max(tl.abs(dy), 0), tl.max(tl.abs(dy_rest), 0))
        scale = tl.maximum(most, smallest) / largest
        tl.store(scales + row, scale, mask=row < m)
        tl.store(narrow + at + first, (dy * (1 / scale)).to(narrow.dtype.element_ty), mask=here)
        tl.store(narrow + at + last, (dy_rest * (1 / scale)).to(narrow.dtype.element_ty), mask=rest)
        total += dy
        total_rest += dy_rest
    tl.store(sums + tl.program_id(0) * N + first, total, mask=first < N)
    tl.store(sums + tl.program_id(0) * N + last, total_rest, mask=last < N)


@triton.jit
def gradient(x, made, there, ACT: tl.constexpr):
    """Return the gradients at x times the derivative of an activation at `made`."""
    y = tl.load(made, mask=there, other=0.0).to(tl.float32)
    return tl.load(x, mask=there, other=0.0).to(tl.float32) * slope(y, ACT)


@triton.jit
def slope(y, ACT: tl.constexpr):
    """Return the derivative of an activation at its input y; for ReLU y is the output. As in kernels/gelu.py.

    A quotient 1 / x is the square of rsqrt(x), which is one instruction.
    """
    if ACT == "relu":
        found = tl.where(y > 0, 1.0, 0.0)
    else:
        square = y * y
        if ACT == "gelu_tanh":
            root = tl.rsqrt(1 + tl.exp2(y * (-2.302208198144325 - 0.1029432395800235 * square)))
            share = root * root
            density = share * (1 - share) * (1.5957691216057308 + 0.21406444881780076 * square)
        else:
            bell = tl.exp2(-0.7213475204444817 * square)
            root = tl.rsqrt(1 + 0.23164188826636045 * tl.abs(y))
            t = root * root
            tail = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
            tail = 0.5 * bell * t * (0.254829592 + t * (-0.284496736 + t * tail))
            share = tl.where(y < 0, tail, 1 - tail)
            density = 0.3989422804014327 * bell
        found = share + y * density
    return found


@triton.jit
def read_cache(
    q, k, v, mask, bias, table, out, weight, scale,
    q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, mask_b, mask_t, mask_s, bias_b, bias_h, bias_t, bias_s, out_n,
    table_b, groups, shared, t, s, span, key_width, value_width,
    PAGE: tl.constexpr, ORIGINS: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, WHOLE: tl.constexpr,
    EARLY: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Attention of few queries to many keys: a program reads `span` keys of one group, for all heads that share them.

    It writes the weighted means of its values [n, b, t, h, k_v] and log2 of the sum of their weights [n, b, t, h].
    The latter are omitted if one part covers all keys (WHOLE). With pages of PAGE tokens, keys and values are pools,
    and `table` has the pages of each row; 0: each row has its own. With ORIGINS, `table` has the row of each key.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
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
        if ORIGINS:  # loaded beside the mask
            origin = tl.load(table + b * table_b + slot, mask=slot < s, other=0).to(tl.int64)
        if MASKED:
            visible = mask + b * mask_b + token[:, None] * mask_t + slot[None] * mask_s
            seen = seen & (tl.load(visible, mask=seen, other=0) != 0)
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:  # empty slots are not read
            if PAGE:
                page = tl.load(table + b * table_b + slot // PAGE, mask=slot < s, other=0).to(tl.int64)
                at_key = k + g * k_g + (page * PAGE + slot % PAGE) * k_s
                at_value = v + g * v_g + (page * PAGE + slot % PAGE) * v_s
            elif ORIGINS:
                at_key, at_value = k + origin * k_b + g * k_g + slot * k_s, v + origin * v_b + g * v_g + slot * v_s
            else:
                at_key, at_value = k + b * k_b + g * k_g + slot * k_s, v + b * v_b + g * v_g + slot * v_s
            there = (slot < s)[None] & (x < key_width)[:, None]
            keys = tl.load(at_key[None] + x[:, None], mask=there, other=0.0)
            inside = (slot < s)[:, None] & (y < value_width)[None]
            values = tl.load(at_value[:, None] + y[None], mask=inside, other=0.0)
            scores = product(asked, keys, ROWS) * scale
            if BIASED:
                added = bias + b * bias_b + head[:, None] * bias_h + token[:, None] * bias_t + slot[None] * bias_s
                scores += tl.load(added, mask=seen, other=0.0).to(tl.float32)
            scores = tl.where(seen, scores * 1.4426950408889634, -float("inf"))  # exp2 from here on
            high = tl.maximum(most, tl.max(scores, 1))
            level = tl.where(high == -float("inf"), 0.0, high)
            p = tl.exp2(scores - level[:, None])
            shrink = tl.exp2(most - level)
            share = share * shrink + tl.sum(p, 1)
            mean = mean * shrink[:, None] + product(p.to(values.dtype), values, ROWS)
            most = high
    empty = share == 0.0
    share = tl.where(empty, 1.0, share)
    mean = mean / share[:, None]
    place = tl.program_id(1) * out_n + (b * t + token) * groups * shared + head
    at = out + place[:, None] * value_width + y[None]
    tl.store(at, mean.to(out.dtype.element_ty), mask=here[:, None] & (y < value_width)[None])
    if not WHOLE:
        tl.store(weight + place, tl.where(empty, -1e30, most + tl.log2(share)), mask=here)


@triton.jit
def product(a, b, ROWS: tl.constexpr):
    """Return a [ROWS, k] @ b [k, n]. Tensor cores take at least 16 rows; a single row is computed as a sum."""
    if ROWS == 1:
        found = tl.sum(tl.trans(a).to(tl.float32) * b.to(tl.float32), 0)[None]
    else:
        found = tl.dot(a, b, input_precision="ieee")
    return found


@triton.jit
def join_parts(parts, weights, out, rows, width, N: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Average `parts` [n, rows, width], weighted by 2^`weights` [n, rows]."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, part, at = tl.program_id(0), tl.arange(0, PARTS), tl.arange(0, WIDTH)
    weight = tl.load(weights + part * rows + row, mask=part < N, other=-float("inf"))
    share = tl.exp2(weight - tl.max(weight, 0))
    there = (part < N)[:, None] & (at < width)[None]
    found = tl.load(parts + (part[:, None].to(tl.int64) * rows + row) * width + at[None], mask=there, other=0.0)
    mean = tl.sum(found * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + row.to(tl.int64) * width + at, mean.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def regroup_rows(x, rows, length, size, slots, width, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Replace row i by row `rows[i]`, in place; one program reads and then writes N neighbouring rows."""
    group = tl.program_id(0).to(tl.int64)
    row, at = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = (at < size) & ((at // width) % slots < tl.load(length))
    here = (row < N)[:, None] & wanted[None, :]
    source = tl.load(rows + group * N + row, mask=row < N, other=0)
    found = tl.load(x + source[:, None] * size + at[None, :], mask=here)
    tl.debug_barrier()  # no thread writes before all have read
    tl.store(x + (group * N + row)[:, None] * size + at[None, :], found, mask=here)


@triton.jit
def norm_rows(x, weight, out, stride, width, eps, WIDE: tl.constexpr):
    """Divide a row by the root of its mean square, round it, and multiply it by the weights."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    inside = at < width
    y = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / width + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    rounded = y.to(out.dtype.element_ty).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row * width + at, rounded.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(gate, up, out, gate_stride, up_stride, width, WIDE: tl.constexpr):
    """Multiply SiLU of the gate, rounded, by the other half."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = at < width
    x = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    opened = (x / (1.0 + tl.exp(-x))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (opened * y).to(out.dtype.element_ty), mask=inside)
