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
        y = tl.load(made + at, mask=there, other=0.0).to(tl.float32)
        dy = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * slope(y, ACT)
        tl.store(out + at, dy.to(out.dtype.element_ty), mask=there)
        total += dy
    tl.store(sums + tl.program_id(0) * n + column, tl.sum(total, 0)[None], mask=column < n)


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
def columns(x, at, FLAT: tl.constexpr, ROWS: tl.constexpr):
    """Load part of x as a row, in every row of threads (FLAT) or once, passed between them."""
    if FLAT:
        row = tl.load(x + at[None] + tl.zeros([ROWS, 1], tl.int32))
    else:
        row = tl.load(x + at)[None]
    return row


@triton.jit
def multiply_row(
    x, w, scale, bias, norm, residual, y, n, eps, K: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
    PACKED: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Multiply x [K] by some rows of w; y [n] is x wᵀ · scale + bias + residual, each of which may be None.

    `norm` [K] are the weights of an RMSNorm of x, or None. Its factor is applied to the sums, so that x is read once.
    EARLY: loads AHEAD columns, which no earlier kernel writes, before the kernel that writes x has ended.
    """
    source, row = rows_of(n, GATED, ROWS)
    at = tl.arange(0, COLUMNS)
    here = w + source.to(tl.int64)[:, None] * K + at[None]
    weights, gains = (), ()
    for start in tl.static_range(0, AHEAD, COLUMNS):
        weights += (tl.load(here + start),)  # type: ignore[assignment]
        if norm is not None:
            gains += (columns(norm, start + at, FLAT, ROWS),)  # type: ignore[assignment]
    factor = None if scale is None else tl.load(scale + source)
    shift = None if bias is None else tl.load(bias + source)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    added = None if residual is None else tl.load(residual + row, mask=row < n)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS if FLAT else 1, COLUMNS], tl.float32)
    for start in tl.static_range(0, K, COLUMNS):
        some = weights[start // COLUMNS] if start < AHEAD else tl.load(here + start)
        part = columns(x, start + at, FLAT, ROWS).to(tl.float32)
        if norm is not None:
            squares += part * part
            gain = gains[start // COLUMNS] if start < AHEAD else columns(norm, start + at, FLAT, ROWS)
            part *= gain.to(tl.float32)
        total += widen(some, PACKED) * part
    out = tl.sum(total, 1)
    if scale is not None:
        out *= factor
    if norm is not None:
        out *= tl.rsqrt(tl.sum(squares, 1) / K + eps)
    store_row(out, shift, added, y, row, n, GATED)


@triton.jit
def rows_of(n, GATED: tl.constexpr, ROWS: tl.constexpr):
    """Return the ROWS rows of the weight that a program reads, and the elements of y [n] that it writes.

    GATED: row i of the gate and row n + i of the other half are neighbours. Past the end, the last rows are read again.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if GATED:
        return tl.minimum(row // 2, n - 1) + row % 2 * n, tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        return tl.minimum(row, n - 1), row


@triton.jit
def store_row(out, shift, added, y, row, n, GATED: tl.constexpr):
    """Store sums + shift + added; GATED, silu(gate) · other + added of each pair of neighbours."""
    if shift is not None:
        out += shift.to(tl.float32)
    if GATED:
        gate, other = tl.split(tl.reshape(out, [out.shape[0] // 2, 2]))
        out = gate / (1.0 + tl.exp(-gate)) * other
    if added is not None:
        out += added.to(tl.float32)
    tl.store(y + row, out.to(y.dtype.element_ty), mask=row < n)


@triton.jit
def multiply_rows(
    x, w, scale, bias, y, m, n, K: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply x [m, K] by some rows of w [n, K] in 8 bits and their scales."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, some, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, M), tl.arange(0, COLUMNS)
    here = w + tl.minimum(row, n - 1).to(tl.int64)[None] * K + at[:, None]  # past the end: the last row again
    given = x + some[:, None] * K + at[None]
    total = tl.zeros([M, ROWS], tl.float32)
    for start in range(0, K, COLUMNS):
        left = tl.load(given + start, mask=(some < m)[:, None], other=0.0)
        total = tl.dot(left, tl.load(here + start).to(left.dtype), total)
    total *= tl.load(scale + row, mask=row < n, other=0.0)[None]
    if BIASED:
        total += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None]
    there = (some < m)[:, None] & (row < n)[None]
    tl.store(y + some[:, None] * n + row[None], total.to(y.dtype.element_ty), mask=there)


@triton.jit
def widen(x, PACKED: tl.constexpr):
    """Convert to fp32. GPUs convert integers at an eighth of their multiplication rate. PACKED int8 are inserted
    as the low bits of 2^23 + 128 + x instead, four at a time."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 $0, t, 0x4B000000, 0x7440;
            prmt.b32 $1, t, 0x4B000000, 0x7441;
            prmt.b32 $2, t, 0x4B000000, 0x7442;
            prmt.b32 $3, t, 0x4B000000, 0x7443;
            sub.f32 $0, $0, 0f4B000080;
            sub.f32 $1, $1, 0f4B000080;
            sub.f32 $2, $2, 0f4B000080;
            sub.f32 $3, $3, 0f4B000080;
            }""",
            "=r,=r,=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def multiply_row_int4(
    x, w, scale, bias, norm, residual, y, n, eps, K: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply as `multiply_row`, by w [n, K] in 4 bits, of which each GROUP has a scale [n, K // GROUP].

    Eight integers are a word of 32 bits, in the order of `int4.interleave`. A thread loads a unit of four words, and
    the 32 elements of x and of `norm` that belong to them as pairs of type HALF, four pairs at a time.
    """
    source, row = rows_of(n, GATED, ROWS)
    at, unit = tl.arange(0, COLUMNS // 8), tl.arange(0, COLUMNS // 32)
    safe, pair = source.to(tl.int64)[:, None], at // 4 * 16 + at % 4
    here, group = w + safe * (K // 8) + at[None], scale + safe * (K // GROUP)
    shift = None if bias is None else tl.load(bias + source)
    total = tl.zeros([ROWS, COLUMNS // 32], tl.float32)
    squares = tl.zeros([COLUMNS // 8], tl.float32)
    for start in tl.static_range(0, K // 32, COLUMNS // 32):
        words = tl.load(here + start * 4)
        factor = tl.load(group + (start + unit[None]) // (GROUP // 32)).to(tl.float32)
        if norm is not None:
            gains = load_pairs(norm + start * 16 + pair)
        if start == 0:
            if EARLY:
                gdc_wait()
                gdc_launch_dependents()
            added = None if residual is None else tl.load(residual + row, mask=row < n)
        pairs = load_pairs(x + start * 16 + pair)
        part = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
        for byte in tl.static_range(4):
            first, second = widen_pair(pairs[byte], HALF)
            if norm is not None:
                squares += first * first + second * second
                first_gain, second_gain = widen_pair(gains[byte], HALF)
                first, second = first * first_gain, second * second_gain
            part += widen_nibble(words, 2 * byte, PACKED) * (first * (1.0 / (1 << 8 * (byte % 2))))[None]
            part += widen_nibble(words, 2 * byte + 1, PACKED) * (second * (1.0 / (16 << 8 * (byte % 2))))[None]
        total += tl.sum(tl.reshape(part, [ROWS, COLUMNS // 32, 4]), 2) * factor
    out = tl.sum(total, 1)
    if norm is not None:
        out *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    store_row(out, shift, added, y, row, n, GATED)


@triton.jit
def load_pairs(pair):
    """Load the pairs of elements that belong to each of the four bytes of a word."""
    return tl.load(pair), tl.load(pair + 4), tl.load(pair + 8), tl.load(pair + 12)


@triton.jit
def widen_pair(pair, HALF: tl.constexpr):
    """Convert the two elements of a pair to fp32."""
    first = (pair & 0xFFFF).to(tl.uint16).to(HALF, bitcast=True).to(tl.float32)
    second = ((pair >> 16) & 0xFFFF).to(tl.uint16).to(HALF, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def widen_nibble(words, AT: tl.constexpr, PACKED: tl.constexpr):
    """Convert integer AT of each word to fp32, times 16^(AT % 4): inserted where it is, as bits of 2^23 (`widen`)."""
    place: tl.constexpr = 4 * (AT % 4)
    half = words >> 16 if AT >= 4 else words
    if PACKED:  # one instruction, where the compiler takes two
        mask = tl.full(words.shape, 15 << place, tl.int32)
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x4B000000, 0xEA;", "=r,r,r", [half, mask], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        bits = (half & (15 << place)) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + (8 << place))


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
