"""Choosing tokens: the noise by a second, slow implementation and by chi-square tests; the same choice everywhere."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.generation.sampling import TokenChoice, bits, greedy, gumbel, mix, row_seeds, sample

words = st.integers(0, 2**32 - 1)
seeds = st.integers(-(2**63), 2**63 - 1)


def mixed(x: int) -> int:
    for shift, factor in ((16, 0x3F84D5B5), (15, 0x082EFA99)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 15


def told(seed: int, step: int, token: int) -> int:
    """The 52 bits in Python's whole numbers, which do not overflow."""
    keys = []
    for state in (0x243F6A88, 0x85A308D3):
        for word in (seed % 2**32, (seed >> 32) % 2**32, step):
            state = mixed(state ^ word)
        keys.append(state)
    low = mixed(keys[0] ^ token)
    return (mixed(keys[1] ^ low) * 2**32 + low) >> 12


def logits_of(*shape: int, seed: int = 0, scale: float = 1.5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def far(observed: Tensor, expected: Tensor) -> float:
    """By how many standard deviations chi-square is too large (or, negative, too small)."""
    assert expected.min() > 5
    chi, freedom = ((observed - expected).square() / expected).sum(), observed.numel() - 1
    return float((chi - freedom) / (2 * freedom) ** 0.5)


# -- the hash -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(seeds, words), min_size=1, max_size=4), st.integers(1, 40))
def test_the_hash_is_the_documented_one(rows: list[tuple[int, int]], vocab: int):
    made = bits(torch.tensor([seed for seed, _ in rows]), torch.tensor([step for _, step in rows]), vocab)
    assert made.tolist() == [[told(seed, step, token) for token in range(vocab)] for seed, step in rows]


def test_mix_turns_half_of_the_bits():
    """Each of the 32 bits of the input turns each of the output, and no two inputs meet."""
    x = torch.arange(1 << 16) * 0x9E37 % 2**32
    out, bit = mix(x), torch.arange(32)
    assert len(out.unique()) == len(x)
    for i in range(32):
        turned = ((out ^ mix(x ^ 1 << i))[:, None] >> bit & 1).double().mean(dim=0)
        assert ((turned - 0.5).abs() < 0.04).all(), (i, turned)


GRIDS = {  # neighbours along one axis, all else the same: 2^16 numbers each
    "tokens": lambda: bits(torch.tensor([3]), torch.tensor([7]), 1 << 16),
    "steps": lambda: bits(torch.full((1 << 16,), 3), torch.arange(1 << 16), 1),
    "seeds": lambda: bits(torch.arange(1 << 16), torch.full((1 << 16,), 7), 1),
    "high seeds": lambda: bits(torch.arange(1 << 16) << 40, torch.full((1 << 16,), 7), 1),
    "seeds and steps": lambda: bits(torch.arange(1 << 8).repeat(1 << 8), torch.arange(1 << 16) >> 8, 1),
    "rows of one seed": lambda: bits(row_seeds(5, 1 << 16), torch.zeros(1 << 16), 1),
    "row 0 of many seeds": lambda: bits(torch.cat([row_seeds(i, 1) for i in range(1 << 10)]), torch.zeros(1 << 10), 64),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_uniform_and_independent(grid: str):
    """Each bit, the 64 highest and lowest cells, and pairs of neighbours at several distances."""
    number = GRIDS[grid]().flatten()
    n = len(number)
    share = (number[:, None] >> torch.arange(52) & 1).double().mean(dim=0)
    assert ((share - 0.5).abs() < 4.5 * 0.5 / n**0.5).all()
    for shift in (46, 20, 0):  # of `high`, across the seam, of `low`
        cell = number >> shift & 63
        assert abs(far(cell.bincount(minlength=64).double(), torch.full((64,), n / 64))) < 5
    for distance in (1, 2, 16, 256):
        pair = (number[:-distance] >> 48) * 16 + (number[distance:] >> 48)
        assert abs(far(pair.bincount(minlength=256).double(), torch.full((256,), len(pair) / 256))) < 5


def test_no_number_twice():
    """Over neighbouring seeds, steps and tokens at once."""
    seed, step = torch.arange(32).repeat(32), torch.arange(32).repeat_interleave(32)
    assert len(bits(seed, step, 512).unique()) == 32 * 32 * 512
    rows = torch.cat([row_seeds(seed, 256) for seed in (*range(64), -1, 2**40, 2**63)])
    assert len(rows.unique()) == len(rows)
    assert (rows >= 0).all()
    assert torch.equal(row_seeds(9, 3), row_seeds(9, 8)[:3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gumbel(dtype: torch.dtype):
    """Finite; and exp(-exp(-noise)) is uniform, also far out on the right, where the winners are."""
    noise = gumbel(torch.arange(256), torch.zeros(256), 4096, dtype).flatten()
    assert noise.dtype == dtype
    assert noise.isfinite().all()
    n, right = len(noise), torch.expm1(-(-noise.double()).exp()).neg()  # the probability of more
    assert abs(far((right * 64).long().bincount(minlength=64).double(), torch.full((64,), n / 64))) < 5
    for tail in (1e-2, 1e-3, 1e-4):
        assert abs(int((right < tail).sum()) - n * tail) < 5 * (n * tail) ** 0.5
    assert len(noise.unique()) > 0.9 * n


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("number", [0, 2**52 - 1])
def test_gumbel_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, number: int):
    monkeypatch.setattr("anyformer.generation.sampling.bits", lambda *_: torch.tensor([[number]]))
    assert gumbel(torch.zeros(1), torch.zeros(1), 1, dtype).isfinite().all()


# -- by probability -------------------------------------------------------------------------------------------------

N = 40_000
OVER = {
    "seeds": (torch.arange(N), torch.full((N,), 5)),
    "steps": (torch.full((N,), 5), torch.arange(N)),
    "rows of one seed": (row_seeds(1, N), torch.zeros(N, dtype=torch.long)),
}


@pytest.mark.parametrize("over", OVER)
def test_frequencies_are_those_of_the_softmax(over: str):
    """And a choice says nothing of the next: pairs occur as often as the product of their probabilities."""
    logits = logits_of(9)
    logits[4] = -math.inf
    chosen = sample(logits.expand(N, 9), *OVER[over]).ids
    p = logits.double().softmax(dim=-1)
    possible = torch.arange(9) != 4
    observed = chosen.bincount(minlength=9).double()
    assert observed[4] == 0
    assert abs(far(observed[possible], N * p[possible])) < 5
    for distance in (1, 2, 64):
        pairs = (chosen[:-distance] * 9 + chosen[distance:]).bincount(minlength=81).double().view(9, 9)
        expected = (N - distance) * p[:, None] * p
        frequent = expected > 5
        assert abs(far(pairs[frequent], expected[frequent])) < 5


def test_seeds_and_steps_are_not_exchangeable():
    """Row i at step j has nothing to do with row j at step i, nor with its own next step or the next row."""
    i, j, flat = torch.arange(N), torch.arange(N) * 7919 % N, torch.zeros(N, 4)
    first = sample(flat, i, j).ids
    for seed, step in ((j, i), (i, j + 1), (i + 1, j), (i + 1, j - 1), (i, j ^ 1), (i ^ 1, j ^ 1), (i + (1 << 32), j)):
        table = (first * 4 + sample(flat, seed, step).ids).bincount(minlength=16).double()
        assert abs(far(table, torch.full((16,), N / 16))) < 5


def test_a_large_vocabulary():
    """Tokens of one in 250,000 each are drawn as often as they should be together."""
    v, n = 25_000, 400
    logits = torch.zeros(v)
    logits[0] = math.log(9 * (v - 1))  # nine in ten
    chosen = torch.cat(
        [sample(logits.expand(20, v), torch.arange(20) + i, torch.zeros(20)).ids for i in range(0, n, 20)]
    )
    rare = chosen[chosen != 0]
    assert abs(len(rare) - n / 10) < 5 * (n * 0.09) ** 0.5
    assert len(rare.unique()) == len(rare)


@given(st.lists(st.tuples(seeds, st.integers(0, 2**20)), min_size=1, max_size=6), st.randoms(), st.integers(1, 50))
def test_a_row_is_the_same_in_any_batch(rows: list[tuple[int, int]], random, vocab: int):
    logits = logits_of(len(rows), vocab)
    seed, step = torch.tensor([seed for seed, _ in rows]), torch.tensor([step for _, step in rows])
    whole = sample(logits, seed, step)
    order = torch.tensor(random.choices(range(len(rows)), k=random.randint(1, 9)))
    assert torch.equal(sample(logits[order], seed[order], step[order]).ids, whole.ids[order])
    assert torch.equal(sample(logits[order], seed[order], step[order].int()).ids, whole.ids[order])
    alone = [sample(logits[i : i + 1], seed[i : i + 1], step[i : i + 1]).ids for i in range(len(rows))]
    assert torch.equal(torch.cat(alone), whole.ids)


def test_generators_are_left_alone():
    before = torch.get_rng_state()
    first = sample(logits_of(4, 9), torch.arange(4), torch.zeros(4))
    torch.manual_seed(77)
    assert torch.equal(sample(logits_of(4, 9), torch.arange(4), torch.zeros(4)).ids, first.ids)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype: torch.dtype):
    """The same as from the same numbers in fp32; a sum in half precision would differ."""
    logits = logits_of(2000, 50).to(dtype)
    chosen = sample(logits, torch.arange(2000), torch.zeros(2000)).ids
    assert torch.equal(chosen, sample(logits.float(), torch.arange(2000), torch.zeros(2000)).ids)
    rough = (logits + gumbel(torch.arange(2000), torch.zeros(2000), 50).to(dtype)).argmax(dim=-1)
    assert not torch.equal(chosen, rough)


# -- the likeliest --------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(-2, 2), min_size=5, max_size=5), min_size=1, max_size=4))
def test_greedy_takes_the_first_of_equals(rows: list[list[int]]):
    chosen, ok = greedy(torch.tensor(rows).float())
    assert chosen.tolist() == [row.index(max(row)) for row in rows]
    assert ok.all()


def test_greedy_ties_in_a_large_vocabulary():
    logits = torch.zeros(2, 70_001)
    logits[:, [123, 40_000, 70_000]] = 1
    assert greedy(logits).ids.tolist() == [123, 123]


# -- what is no distribution ----------------------------------------------------------------------------------------

INF, NAN = math.inf, math.nan
ROWS = {
    "numbers": ([0.0, 1.0, -3.0], True),
    "one possible": ([-INF, -INF, -1e30], True),
    "nothing possible": ([-INF, -INF, -INF], False),
    "a NaN": ([0.0, NAN, 1.0], False),
    "a NaN among the impossible": ([-INF, NAN, -INF], False),
    "NaN alone": ([NAN, NAN, NAN], False),
    "infinite": ([0.0, INF, 1.0], False),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ok(dtype: torch.dtype):
    """Told row by row; every id is one of the vocabulary, and rows that are well are not disturbed."""
    logits = torch.tensor([row for row, _ in ROWS.values()], dtype=dtype)
    for chosen in (greedy(logits), *(sample(logits, torch.arange(7), torch.full((7,), i)) for i in range(50))):
        assert chosen.ok.tolist() == [ok for _, ok in ROWS.values()]
        assert ((chosen.ids >= 0) & (chosen.ids < 3)).all()
        assert chosen.ids[1] == 2
    assert torch.equal(sample(logits[:1], torch.zeros(1), torch.full((1,), 49)).ids, chosen.ids[:1])


# -- the host is not asked ------------------------------------------------------------------------------------------


def test_shapes_alone_suffice():
    """On the meta device there is nothing to read."""
    logits, row = torch.zeros(3, 7, device="meta"), torch.zeros(3, dtype=torch.long, device="meta")
    for chosen in (greedy(logits), sample(logits, row, row)):
        assert isinstance(chosen, TokenChoice)
        assert chosen.ids.shape == chosen.ok.shape == (3,)
        assert chosen.ids.dtype == torch.long


def test_compiled():
    compiled = torch.compile(sample, backend="aot_eager", fullgraph=True)
    seed = torch.tensor([-(2**63), -1, 0, 1, 2**63 - 1, 2**31])
    for i, step in enumerate((0, 1, 5, 2**31 - 1, 2**31, 2**32 - 1)):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            args = logits_of(6, 1003, seed=i), seed, torch.full((6,), step)
            assert all(torch.equal(a, b) for a, b in zip(compiled(*args), sample(*args), strict=True))
