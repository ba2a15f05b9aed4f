"""Triton kernels of beam search. This module is imported only where they run; see `beam_candidates.py`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def top_of_parts(x, values, tokens, highest, sums, stride, v, parts, K: tl.constexpr, SIZE: tl.constexpr,
                 EARLY: tl.constexpr):  # fmt: skip
    """Write the K largest of SIZE elements of a row of x [rows, v], and the maximum and sum of exp(x - maximum).

    A maximum is found, written and removed, K times; of equal elements the first. The sum is NaN if an element is NaN
    or inf.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, SIZE)
    at = part * SIZE + index
    here = tl.load(x + row * stride + at, mask=at < v, other=-float("inf")).to(tl.float32)
    place = row * parts + part
    high, first = tl.max(here, 0, return_indices=True, return_indices_tie_break_left=True)
    level = tl.where(high == -float("inf"), 0.0, high)
    tl.store(highest + place, high)
    tl.store(sums + place, tl.sum(tl.exp2((here - level) * 1.4426950408889634), 0))
    for i in range(K):
        tl.store(values + place * K + i, high)
        tl.store(tokens + place * K + i, tl.minimum(part * SIZE + first, v - 1))
        here = tl.where(index == first, -float("inf"), here)
        high, first = tl.max(here, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def merge_beams(
    values, tokens, highest, sums, log_p, failed, scores, flat, fails, v, width, parts, K: tl.constexpr,
    BEAMS: tl.constexpr, PARTS: tl.constexpr, ALL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the K best continuations of the `width` beams of one search, from the parts of their rows.

    `log_p` [n, width] are the log-probabilities of the beams. A beam without a distribution ends its search.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    search = tl.program_id(0).to(tl.int64)
    beam, part = tl.arange(0, BEAMS), tl.arange(0, PARTS)
    row = search * width + tl.minimum(beam, width - 1)
    place = row[:, None] * parts + part[None]
    most = tl.load(highest + place, mask=(part < parts)[None], other=-float("inf"))
    share = tl.load(sums + place, mask=(part < parts)[None], other=0.0)
    high = tl.max(most, 1)
    share = tl.sum(share * tl.exp2((most - high[:, None]) * 1.4426950408889634), 1)  # NaN if all are -inf
    total = high + tl.log2(share) * 0.6931471805599453
    bad = tl.max((total != total).to(tl.int32), 0) + tl.load(failed + search).to(tl.int32)
    tl.store(fails + search, (bad > 0).to(fails.dtype.element_ty))

    each = tl.arange(0, ALL)
    there = (each < parts * K)[None] & (beam < width)[:, None]
    found = tl.load(values + row[:, None] * parts * K + each[None], mask=there, other=-float("inf"))
    before = tl.load(log_p + row)
    score = tl.where(there, before[:, None] + (found - total[:, None]), -float("inf"))
    score = tl.where(bad > 0, -float("inf"), score)
    score = tl.reshape(score, [BEAMS * ALL])
    index = tl.arange(0, BEAMS * ALL)
    for i in range(K):
        best, first = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.minimum(first // ALL, width - 1)
        token = tl.load(tokens + (search * width + chosen) * parts * K + tl.minimum(first % ALL, parts * K - 1))
        tl.store(scores + search * K + i, best)
        tl.store(flat + search * K + i, chosen.to(tl.int64) * v + token)
        score = tl.where(index == first, -float("inf"), score)
