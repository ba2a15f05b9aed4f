"""Numbers by counting: they depend on seed, text, use and place alone, and no pattern is seen in them."""

from itertools import combinations

import numpy as np
from hypothesis import given, strategies as st

from anyformer.data.counter_rng import CounterRNG, below, lowest, unit

numbers = st.lists(st.integers(0, 2**40), min_size=1, max_size=20)


def each(chance: CounterRNG, use: int, sizes: list[int]) -> list[list[int]]:
    """The numbers of each text."""
    found = chance.draw(use, np.array(sizes))
    assert found.dtype == np.uint64
    return [part.tolist() for part in np.split(found, np.cumsum(sizes)[:-1])]


@given(numbers, st.integers(0, 9), st.integers(0, 9), st.data())
def test_what_a_text_is_given_depends_on_no_other(texts: list[int], seed: int, use: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(texts), max_size=len(texts)))
    together = each(CounterRNG(np.array(texts), seed, 3), use, sizes)
    for text, size, drawn in zip(texts, sizes, together, strict=True):
        assert [drawn] == each(CounterRNG(np.array([text]), seed, 3), use, [size])
        assert [drawn] == [part[:size] for part in each(CounterRNG(np.array([text]), seed, 3), use, [size + 5])]


def test_numbers_are_spread_evenly() -> None:
    drawn = unit(CounterRNG(np.arange(500), 1, 2).draw(0, np.full(500, 400)))
    assert ((drawn >= 0) & (drawn < 1)).all()
    for count in (2, 10, 1000):
        found, mean = np.bincount((drawn * count).astype(int), minlength=count), drawn.size / count
        excess = (((found - mean) ** 2 / mean).sum() - (count - 1)) / (2 * count) ** 0.5  # chi squared, in deviations
        assert abs(excess) < 5


def test_neighbours_know_nothing_of_each_other() -> None:
    """Of place, text, use, epoch and seed: neither the numbers nor any of their bits."""
    sizes = np.full(64, 64)
    drawn = {
        (seed, epoch, use): CounterRNG(np.arange(64), seed, epoch).draw(use, sizes).reshape(64, 64)
        for seed in range(3)
        for epoch in range(3)
        for use in range(3)
    }
    assert len(np.unique(np.stack(list(drawn.values())))) == 27 * 64 * 64
    unlike: list[tuple[np.ndarray, np.ndarray]] = list(combinations(drawn.values(), 2))
    for some in drawn.values():
        unlike += [(some[1:], some[:-1]), (some[:, 1:], some[:, :-1]), (some[1:, 1:], some[:-1, :-1])]
    for one, other in unlike:
        deviation = one.size**-0.5
        assert abs(np.mean((unit(one) - 0.5) * (unit(other) - 0.5)) * 12) < 6 * deviation
        flipped = [np.mean((one ^ other) >> np.uint64(bit) & np.uint64(1)) for bit in range(64)]
        assert max(abs(np.array(flipped) - 0.5)) * 2 < 6 * deviation


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=20), st.integers(0, 99))
def test_the_lowest_of_each_are_found(many: list[tuple[int, int]], seed: int) -> None:
    sizes, counts = np.array(many).max(axis=1), np.array(many).min(axis=1)
    drawn = CounterRNG(np.arange(len(sizes)), seed).draw(0, sizes)
    found = np.split(drawn[lowest(drawn, sizes, counts)], counts.cumsum()[:-1])
    for values, chosen, count in zip(np.split(drawn, sizes.cumsum()[:-1]), found, counts, strict=True):
        assert chosen.tolist() == sorted(values)[:count]


def test_the_lowest_are_found_among_high_ones() -> None:
    """And among others that are far lower, where only few are looked at."""
    high = np.full(100, 2**64 - 2**20, dtype=np.uint64) - np.arange(100, dtype=np.uint64) * np.uint64(2**30)
    drawn, sizes = np.concatenate((high, np.arange(100, dtype=np.uint64) << np.uint64(40))), np.array([100, 100])
    assert lowest(drawn, sizes, np.array([3, 2])).tolist() == [99, 98, 97, 100, 101]


def test_every_choice_is_as_likely() -> None:
    sizes, counts = np.full(12_000, 6), np.full(12_000, 3)
    found = lowest(CounterRNG(np.arange(12_000), 0, 0).draw(0, sizes), sizes, counts).reshape(-1, 3) % 6
    ways, times = np.unique(found, axis=0, return_counts=True)
    assert len(ways) == 120  # in any order
    assert (abs(times - 100) < 50).all()


@given(st.integers(1, 2**31), st.integers(0, 99))
def test_whole_numbers_stay_below_their_end(end: int, seed: int) -> None:
    found = below(CounterRNG(np.arange(50), seed).draw(0, np.ones(50, dtype=np.int64)), end)
    assert ((found >= 0) & (found < end)).all()
    assert below(np.array([2**64 - 1], dtype=np.uint64), end).tolist() == [end - 1]
    assert below(np.array([0], dtype=np.uint64), end).tolist() == [0]
