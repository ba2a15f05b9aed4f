"""Triton kernels of linear layers on few rows. EARLY: see `triton_kernels`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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

    `norm` [K] are the weights of an RMS norm of x, or None. Its factor is applied to the sums, so that x is read once.
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
