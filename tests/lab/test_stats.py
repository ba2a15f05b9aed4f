"""Means, tests and power laws, against what they are by definition."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from anyformer.lab.stats import difference, power, summary, tabled_test, welch, written_test

NUMBERS = st.lists(st.floats(-5, 5), min_size=2, max_size=6)


@given(NUMBERS, NUMBERS)
def test_welch_is_that_of_scipy(a: list[float], b: list[float]) -> None:
    if np.var(a) + np.var(b) < 1e-6:
        return
    theirs, ours = stats.ttest_ind(a, b, equal_var=False), difference(a, b)
    assert welch(a, b) == pytest.approx(theirs.pvalue, abs=1e-12)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval()), rel=1e-9, abs=1e-12)


@given(NUMBERS, NUMBERS)
def test_an_interval_ends_where_the_p_value_is_0_05(a: list[float], b: list[float]) -> None:
    if np.var(a) + np.var(b) < 1e-6:
        return
    found = difference(a, b)
    assert found.mean == pytest.approx(np.mean(a) - np.mean(b))
    for end in (found.low, found.high):
        if abs(end) < 1e3:
            assert welch(a, [x + end for x in b]) == pytest.approx(0.05, abs=1e-3)


def test_of_equal_numbers_and_of_one() -> None:
    same = difference([1, 1], [2, 2])
    assert (same.mean, same.low, same.high) == (-1, -1, -1)
    assert math.isnan(difference([1], [2, 3]).low)
    assert welch([1, 1], [1, 1]) == 1
    assert welch([1, 1], [2, 2]) == 0
    assert math.isnan(welch([1], [2, 3]))


def test_a_test_in_words() -> None:
    assert written_test([1, 2, 3], [1, 2, 3]) == "p = 1.000"
    assert written_test([1, 1.1, 1.2], [3, 3.1, 3.2]) == "p < 0.001"
    assert [tabled_test([1, 2, 3], other) for other in ([1, 2, 3], [31, 32, 33])] == ["1.000", "< 0.001"]
    for written in (written_test, tabled_test):
        assert written([0.3] * 5, [0.1] * 5) == written([1, 1], [1, 1]) == "no variation"
    assert tabled_test([1], [1]) == ""


@given(st.floats(-3, 3), st.floats(0.01, 100))
def test_a_power_law_is_found(exponent: float, factor: float) -> None:
    x = [1, 2, 5, 11]
    found = power(x, [factor * n**exponent for n in x])
    assert found.exponent == pytest.approx(exponent, abs=1e-9)
    assert found(7) == pytest.approx(factor * 7**exponent)
    assert found.error < 1e-6


def test_summary() -> None:
    found = summary([1.0, 2.0, 3.0])
    assert (found.mean, found.deviation, found.count) == (2, 1, 3)
    assert str(found) == "2.0 ± 1.0"
    assert str(summary([2.5])) == "2.5"


@given(st.floats(0.01, 100), st.floats(1e-4, 10))
def test_a_mean_has_as_many_decimals_as_its_spread(middle: float, apart: float) -> None:
    mean, deviation = str(summary([middle - apart, middle, middle + apart])).split(" ± ")
    assert len(mean.partition(".")[2]) == len(deviation.partition(".")[2])
    assert float(deviation) == pytest.approx(apart, rel=0.06)
