"""Triton kernels of beam search. This module is imported only where they run; see `beam_candidates.py`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def max_of_groups(x, highest, sums, stride, v, groups, TALL: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr):
    """Write the maximum of each SIZE elements of a row of x [rows, v], and the sum of exp(x - maximum).

    A program reads TALL groups. The sum is NaN if an element is NaN or inf.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * TALL + tl.arange(0, TALL)
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None]
    here = tl.load(x + row * stride + at, mask=at < v, other=-float("inf")).to(tl.float32)
    high = tl.max(here, 1)
    level = tl.where(high == -float("inf"), 0.0, high)
    share = tl.sum(tl.exp2((here - level[:, None]) * 1.4426950408889634), 1)
    tl.store(highest + row * groups + group, high, mask=group < groups)
    tl.store(sums + row * groups + group, share, mask=group < groups)


@triton.jit
def best_of_beams(
    x, highest, sums, log_p, failed, scores, flat, fails, stride, v, width, groups, COUNT: tl.constexpr,
    K: tl.constexpr, BEAMS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the COUNT best continuations of the `width` beams of one search; they are in the COUNT best groups.

    `log_p` [n, width] are the log-probabilities of the beams. A beam without a distribution ends its search. A
    continuation precedes those of equal score that have a larger index, beam * v + token.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    search = tl.program_id(0).to(tl.int64)
    beam, group = tl.arange(0, BEAMS), tl.arange(0, GROUPS)
    row = search * width + tl.minimum(beam, width - 1)
    place, there = row[:, None] * groups + group[None], (group < groups)[None] & (beam < width)[:, None]
    most = tl.load(highest + place, mask=(group < groups)[None], other=-float("inf"))
    share = tl.load(sums + place, mask=(group < groups)[None], other=0.0)
    high = tl.max(most, 1)
    share = tl.sum(share * tl.exp2((most - high[:, None]) * 1.4426950408889634), 1)  # NaN if all are -inf
    total = high + tl.log2(share) * 0.6931471805599453
    before = tl.load(log_p + row)
    bad = tl.max((total != total).to(tl.int32), 0) + tl.load(failed + search).to(tl.int32)
    tl.store(fails + search, (bad > 0).to(fails.dtype.element_ty))

    score = tl.where(there, before[:, None] + (most - total[:, None]), -float("inf"))
    score = tl.reshape(tl.where(bad > 0, -float("inf"), score), [BEAMS * GROUPS])
    index, rank = tl.arange(0, BEAMS * GROUPS), tl.arange(0, K)
    chosen = tl.zeros([K], tl.int32)
    for i in range(COUNT):
        first = tl.argmax(score, 0, tie_break_left=True)
        chosen = tl.where(rank == i, first, chosen)
        score = tl.where(index == first, -float("inf"), score)

    # a group may be chosen again where all others are dead: its elements then have the same index
    own, group = tl.minimum(chosen // GROUPS, width - 1), tl.minimum(chosen % GROUPS, groups - 1)
    same = own[:, None] == beam[None]
    before, total = tl.sum(tl.where(same, before[None], 0.0), 1), tl.sum(tl.where(same, total[None], 0.0), 1)
    token = group[:, None] * SIZE + tl.arange(0, SIZE)[None]
    inside = (token < v) & (rank < COUNT)[:, None]
    at = x + (search * width + own)[:, None] * stride + token
    value = tl.load(at, mask=inside, other=-float("inf")).to(tl.float32)
    score = tl.where(inside, before[:, None] + (value - total[:, None]), -float("inf"))
    score = tl.where(bad > 0, -float("inf"), score)
    place = tl.where(inside, own[:, None] * v + token, 2147483647)
    for i in range(COUNT):
        best = tl.max(tl.max(score, 1), 0)
        first = tl.min(tl.min(tl.where(score == best, place, 2147483647), 1), 0)
        tl.store(scores + search * COUNT + i, best)
        tl.store(flat + search * COUNT + i, tl.minimum(first, width * v - 1).to(tl.int64))
        score = tl.where(place == first, -float("inf"), score)
