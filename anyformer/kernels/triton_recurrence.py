"""Triton kernels of chunked linear recurrences with a decay per head, with and without the delta rule.

Names of `fused_recurrence.py`. Tokens are dense [b, t, heads, width]; states are [b, h, n, k, v] for n chunks of C
tokens. `total` [b, h, n·C] holds the log decays summed from the start of each chunk, and `runs` [b, n·C] the runs of
states: a token reads the state that enters its chunk (`enter`) and is in the one that leaves it (`leave`) by its run.
Sums are fp32; operands of matmuls have the data type of the tokens.
"""

import triton
import triton.language as tl


@triton.jit
def read(x, first, rows, stride, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile; rows and columns past the end are 0."""
    row, at = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (at < width)[None]
    return tl.load(x + row[:, None].to(tl.int64) * stride + at[None], mask=there, other=0.0)


@triton.jit
def write(x, tile, first, rows, stride, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, at = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (at < width)[None]
    tl.store(x + row[:, None].to(tl.int64) * stride + at[None], tile.to(x.dtype.element_ty), mask=there)


@triton.jit
def read_decay(total, runs, chunk, DECAY: tl.constexpr, RUNS: tl.constexpr, C: tl.constexpr):
    """Return the decays `enter` [C] and `leave` [C], and that of a whole chunk."""
    at = tl.arange(0, C)
    g, end = tl.zeros([C], tl.float32), tl.full((), 0.0, tl.float32)
    if DECAY:
        g, end = tl.load(total + chunk * C + at), tl.load(total + chunk * C + C - 1)
    enter, leave, through = tl.exp(g), tl.exp(end - g), tl.exp(end)
    if RUNS:
        run = tl.load(runs + chunk * C + at)
        last = tl.load(runs + chunk * C + C - 1)
        before = tl.load(runs + chunk * C - 1, mask=chunk > 0, other=0)
        enter = tl.where(run == before, enter, 0.0)
        leave = tl.where(run == last, leave, 0.0)
        through = tl.where(last == before, through, 0.0)
    return enter, leave, through


@triton.jit
def pair_decay(total, runs, chunk, DECAY: tl.constexpr, RUNS: tl.constexpr, C: tl.constexpr):
    """Return the decay from each key to each query [C, C], 0 for keys that the query does not see."""
    at = tl.arange(0, C)
    seen, distance = at[:, None] >= at[None], tl.zeros([C, C], tl.float32)
    if RUNS:
        run = tl.load(runs + chunk * C + at)
        seen = seen & (run[:, None] == run[None])
    if DECAY:
        g = tl.load(total + chunk * C + at)
        distance = g[:, None] - g[None]
    return tl.exp(tl.where(seen, distance, -float("inf")))


@triton.jit
def invert_overlap(
    k, total, rate, runs, inverse, t, n, heads, repeats, width,
    DECAY: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Write (I + A)⁻¹ of each chunk, A = tril(r k kᵀ · decay, -1).

    Inverses of blocks on the diagonal are joined in pairs, as in `chunked_recurrence.invert_unit_lower`.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h, groups = row // heads, row % heads, heads // repeats
    keys = read(k + (b * t * groups + h // repeats) * width, chunk * C, t, groups * width, 0, width, C, K)
    decay = pair_decay(total + row * n * C, runs + b * n * C, chunk, DECAY, RUNS, C)
    rates = tl.load(rate + (row * n + chunk) * C + tl.arange(0, C))
    at = tl.arange(0, C)
    overlap = tl.dot(keys, tl.trans(keys), input_precision="ieee") * decay * rates[:, None]
    overlap = tl.where(at[:, None] > at[None], overlap, 0.0)
    pair = at // 2
    found = tl.where(at[:, None] == at[None], 1.0, tl.where(pair[:, None] == pair[None], -overlap, 0.0))
    for level in range(1, LEVELS):
        block, pair = at >> level, at >> (level + 1)
        corner = (pair[:, None] == pair[None]) & (block[:, None] != block[None])
        joined = tl.dot(found, tl.where(corner, overlap, 0.0), input_precision=PRECISION)
        found -= tl.dot(joined, found, input_precision=PRECISION)
    write(inverse + row * n * C * C, found, chunk * C, n * C, C, 0, C, C, C)


@triton.jit
def pass_states(
    k, v, total, rate, runs, inverse, state, states, new, last, t, n, heads, repeats, key_width, width,
    DELTA: tl.constexpr, DECAY: tl.constexpr, RUNS: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write the state before each chunk and after the last; with the delta rule, also the values that replace v:
    v' = (I + A)⁻¹ r (v - enter · k S). One program passes V columns of a state from chunk to chunk."""
    column, row = tl.program_id(0) * V, tl.program_id(1).to(tl.int64)
    b, h, groups = row // heads, row % heads, heads // repeats
    k += (b * t * groups + h // repeats) * key_width
    v += (b * t * heads + h) * width
    new += (b * t * heads + h) * width
    total += row * n * C
    rate += row * n * C
    runs += b * n * C
    inverse += row * n * C * C
    states += row * n * key_width * width
    s = read(state + row * key_width * width, 0, key_width, width, column, width, K, V)
    for chunk in range(n):
        write(states, s, 0, key_width, width, column, width, K, V)
        keys = read(k, chunk * C, t, groups * key_width, 0, key_width, C, K)
        values = read(v, chunk * C, t, heads * width, column, width, C, V)
        enter, leave, through = read_decay(total, runs, chunk, DECAY, RUNS, C)
        if DELTA:
            rates = tl.load(rate + chunk * C + tl.arange(0, C))
            solve = read(inverse, chunk * C, n * C, C, 0, C, C, C)
            known = tl.dot(keys, s.to(keys.dtype), input_precision="ieee")
            wanted = rates[:, None] * (values.to(tl.float32) - enter[:, None] * known)
            values = tl.dot(solve, wanted.to(keys.dtype), input_precision="ieee").to(keys.dtype)
            write(new, values, chunk * C, t, heads * width, column, width, C, V)
        leaving = (values.to(tl.float32) * leave[:, None]).to(keys.dtype)
        s = s * through + tl.dot(tl.trans(keys), leaving, input_precision="ieee")
        states += key_width * width
    write(last + row * key_width * width, s, 0, key_width, width, column, width, K, V)


@triton.jit
def read_states(
    q, k, new, total, runs, states, out, t, n, heads, repeats, key_width, width,
    DECAY: tl.constexpr, RUNS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write the outputs (q kᵀ · decay) v' + enter · q S, for V columns of a chunk."""
    column, chunk, row = tl.program_id(0) * V, tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h, groups = row // heads, row % heads, heads // repeats
    shared = (b * t * groups + h // repeats) * key_width
    own = (b * t * heads + h) * width
    queries = read(q + shared, chunk * C, t, groups * key_width, 0, key_width, C, K)
    keys = read(k + shared, chunk * C, t, groups * key_width, 0, key_width, C, K)
    values = read(new + own, chunk * C, t, heads * width, column, width, C, V)
    s = read(states + (row * n + chunk) * key_width * width, 0, key_width, width, column, width, K, V)
    enter, _, _ = read_decay(total + row * n * C, runs + b * n * C, chunk, DECAY, RUNS, C)
    decay = pair_decay(total + row * n * C, runs + b * n * C, chunk, DECAY, RUNS, C)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * decay
    o = tl.dot(queries, s, input_precision="ieee") * enter[:, None]
    o += tl.dot(scores.to(keys.dtype), values, input_precision="ieee")
    write(out + own, o, chunk * C, t, heads * width, column, width, C, V)


# -- gradients --------------------------------------------------------------------------------------------------------


@triton.jit
def value_gradients(
    q, k, d_out, total, runs, d_new, t, n, heads, repeats, key_width, width,
    DECAY: tl.constexpr, RUNS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write the part of the gradient of v' that comes from the outputs of its chunk, (q kᵀ · decay)ᵀ do."""
    column, chunk, row = tl.program_id(0) * V, tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h, groups = row // heads, row % heads, heads // repeats
    shared = (b * t * groups + h // repeats) * key_width
    own = (b * t * heads + h) * width
    queries = read(q + shared, chunk * C, t, groups * key_width, 0, key_width, C, K)
    keys = read(k + shared, chunk * C, t, groups * key_width, 0, key_width, C, K)
    d_o = read(d_out + own, chunk * C, t, heads * width, column, width, C, V)
    decay = pair_decay(total + row * n * C, runs + b * n * C, chunk, DECAY, RUNS, C)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * decay
    found = tl.dot(tl.trans(scores.to(keys.dtype)), d_o, input_precision="ieee")
    write(d_new + own, found, chunk * C, t, heads * width, column, width, C, V)


@triton.jit
def pass_gradients(
    q, k, d_out, total, rate, runs, inverse, d_last, d_states, d_new, d_state, t, n, heads, repeats, key_width, width,
    DELTA: tl.constexpr, DECAY: tl.constexpr, RUNS: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state after each chunk and before the first. With the delta rule, replace the part of
    the gradient of v' in `d_new` by x = (I + A)⁻ᵀ dv', the gradient of r (v - enter · k S)."""
    column, row = tl.program_id(0) * V, tl.program_id(1).to(tl.int64)
    b, h, groups = row // heads, row % heads, heads // repeats
    q += (b * t * groups + h // repeats) * key_width
    k += (b * t * groups + h // repeats) * key_width
    d_out += (b * t * heads + h) * width
    d_new += (b * t * heads + h) * width
    total += row * n * C
    rate += row * n * C
    runs += b * n * C
    inverse += row * n * C * C
    d_states += (row * n + n - 1) * key_width * width
    d_s = read(d_last + row * key_width * width, 0, key_width, width, column, width, K, V)
    for step in range(n):
        chunk = n - 1 - step
        write(d_states, d_s, 0, key_width, width, column, width, K, V)
        queries = read(q, chunk * C, t, groups * key_width, 0, key_width, C, K)
        d_o = read(d_out, chunk * C, t, heads * width, column, width, C, V)
        enter, leave, through = read_decay(total, runs, chunk, DECAY, RUNS, C)
        entered = (d_o.to(tl.float32) * enter[:, None]).to(queries.dtype)
        before = d_s * through + tl.dot(tl.trans(queries), entered, input_precision="ieee")
        if DELTA:
            keys = read(k, chunk * C, t, groups * key_width, 0, key_width, C, K)
            rates = tl.load(rate + chunk * C + tl.arange(0, C))
            solve = read(inverse, chunk * C, n * C, C, 0, C, C, C)
            d_v = read(d_new, chunk * C, t, heads * width, column, width, C, V).to(tl.float32)
            d_v += tl.dot(keys, d_s.to(keys.dtype), input_precision="ieee") * leave[:, None]
            x = tl.dot(tl.trans(solve), d_v.to(keys.dtype), input_precision="ieee")
            write(d_new, x, chunk * C, t, heads * width, column, width, C, V)
            known = (x * (rates * enter)[:, None]).to(keys.dtype)
            before -= tl.dot(tl.trans(keys), known, input_precision="ieee")
        d_s = before
        d_states -= key_width * width
    write(d_state + row * key_width * width, d_s, 0, key_width, width, column, width, K, V)


@triton.jit
def token_gradients(
    q, k, v, new, d_out, total, rate, runs, states, d_states, d_new, dq, dk, dv, d_total, d_rate,
    t, n, heads, repeats, key_width, width,
    DELTA: tl.constexpr, DECAY: tl.constexpr, RUNS: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Write the gradients of q, k, v, decays and rates of a chunk, those of q and k for each head of v."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h, groups = row // heads, row % heads, heads // repeats
    shared = (b * t * groups + h // repeats) * key_width
    own, first = (b * t * heads + h) * width, chunk * C
    queries = read(q + shared, first, t, groups * key_width, 0, key_width, C, K)
    keys = read(k + shared, first, t, groups * key_width, 0, key_width, C, K)
    enter, leave, through = read_decay(total + row * n * C, runs + b * n * C, chunk, DECAY, RUNS, C)
    decay = pair_decay(total + row * n * C, runs + b * n * C, chunk, DECAY, RUNS, C)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * decay
    at = tl.arange(0, C)
    if DELTA:
        rates = tl.load(rate + (row * n + chunk) * C + at)
        overlap_gradient = tl.zeros([C, C], tl.float32)
        read_gradient = tl.zeros([C, K], tl.float32)
        rate_gradient = tl.zeros([C], tl.float32)
    score_gradient = tl.zeros([C, C], tl.float32)
    d_q = tl.zeros([C, K], tl.float32)  # through the state that enters
    d_k = tl.zeros([C, K], tl.float32)  # through the state that leaves
    end = tl.zeros([K], tl.float32)
    for column in range(0, width, V):
        d_o = read(d_out + own, first, t, heads * width, column, width, C, V)
        values = read(new + own, first, t, heads * width, column, width, C, V)
        place = (row * n + chunk) * key_width * width
        s = read(states + place, 0, key_width, width, column, width, K, V)
        d_s = read(d_states + place, 0, key_width, width, column, width, K, V)
        score_gradient += tl.dot(d_o, tl.trans(values), input_precision="ieee")
        d_q += tl.dot(d_o, tl.trans(s), input_precision="ieee")
        d_k += tl.dot(values, tl.trans(d_s), input_precision="ieee")
        if DECAY:
            end += tl.sum(s.to(tl.float32) * d_s.to(tl.float32), 1)
        if DELTA:
            x = read(d_new + own, first, t, heads * width, column, width, C, V)
            given = read(v + own, first, t, heads * width, column, width, C, V).to(tl.float32)
            overlap_gradient -= tl.dot(x, tl.trans(values), input_precision="ieee")
            read_gradient -= tl.dot(x, tl.trans(s), input_precision="ieee")
            d_v = x.to(tl.float32)
            rate_gradient += tl.sum(d_v * given, 1)
            d_v *= rates[:, None]
        else:
            d_v = tl.dot(keys, d_s, input_precision="ieee") * leave[:, None]
            d_v += tl.dot(tl.trans(scores.to(keys.dtype)), d_o, input_precision="ieee")
        write(dv + own, d_v, first, t, heads * width, column, width, C, V)
    wide_queries, wide_keys = queries.to(tl.float32), keys.to(tl.float32)
    d_q *= enter[:, None]
    d_k *= leave[:, None]
    if DECAY:
        moved = score_gradient * scores
        left = tl.sum(wide_keys * d_k, 1)
        d_g = tl.sum(moved, 1) - tl.sum(moved, 0) + tl.sum(wide_queries * d_q, 1) - left
        whole = tl.sum(left, 0) + through * tl.sum(end, 0)
        d_g += tl.where(at == C - 1, whole, 0.0)
    pairs = (score_gradient * decay).to(keys.dtype)
    d_q += tl.dot(pairs, keys, input_precision="ieee")
    d_k += tl.dot(tl.trans(pairs), queries, input_precision="ieee")
    if DELTA:
        overlap_gradient = tl.where(at[:, None] > at[None], overlap_gradient * decay, 0.0)
        moved = overlap_gradient * tl.dot(keys, tl.trans(keys), input_precision="ieee")
        entered = tl.sum(wide_keys * read_gradient, 1) * enter
        rate_gradient += tl.sum(moved, 1) + entered
        tl.store(d_rate + (row * n + chunk) * C + at, rate_gradient)
        if DECAY:
            moved *= rates[:, None]
            d_g += tl.sum(moved, 1) - tl.sum(moved, 0) + rates * entered
        pairs = (overlap_gradient * rates[:, None]).to(keys.dtype)
        d_k += read_gradient * (rates * enter)[:, None]
        d_k += tl.dot(pairs, keys, input_precision="ieee") + tl.dot(tl.trans(pairs), keys, input_precision="ieee")
    if DECAY:
        tl.store(d_total + (row * n + chunk) * C + at, d_g)
    each = (b * t * heads + h) * key_width
    write(dq + each, d_q, first, t, heads * key_width, 0, key_width, C, K)
    write(dk + each, d_k, first, t, heads * key_width, 0, key_width, C, K)
