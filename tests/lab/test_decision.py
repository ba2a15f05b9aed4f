"""Verdicts from conditions: all met, one refuted, or undecided; p values corrected for their number."""

import math
import statistics

import pytest
from hypothesis import given, strategies as st

from anyformer.lab.decision import Fact, More, decide, outcomes_of
from anyformer.lab.stats import hedges, holm, welch

HIGH, LOW = [2.0, 2.1, 2.2, 2.0, 2.1], [1.0, 1.1, 1.2, 1.1, 1.0]
MIXED = [1.0, 2.2, 1.4, 2.0, 1.8]


@pytest.mark.parametrize(
    ("conditions", "word"),
    [
        ([More("a", HIGH, LOW), Fact("b", True)], "holds"),
        ([More("a", HIGH, LOW, 0.5)], "holds"),
        ([More("a", HIGH, 1.5)], "holds"),
        ([More("a", HIGH, LOW, 1.5)], "does not hold here"),
        ([More("a", LOW, HIGH), Fact("b", None)], "does not hold here"),
        ([More("a", HIGH, LOW), Fact("b", False)], "does not hold here"),
        ([More("a", HIGH, MIXED), More("b", HIGH, LOW)], "undecided at this size"),
        ([More("a", HIGH, LOW), Fact("b", None)], "undecided at this size"),
        ([More("a", HIGH[:1], LOW[:1])], "undecided at this size"),
    ],
)
def test_a_verdict_follows_from_its_conditions(conditions: list[More | Fact], word: str) -> None:
    found = decide(conditions)
    assert found.word == word
    assert [one.name for one in found.outcomes] == [one.name for one in conditions]


def test_nothing_is_concluded_where_a_requirement_fails() -> None:
    found = decide([Fact("a", False)], requires=[Fact("it learns", False)])
    assert found.word == "undecided at this size"
    assert "it learns" in found.why


def test_shown_outcomes_do_not_count() -> None:
    (shown,) = outcomes_of([More("post", LOW, HIGH)])
    assert shown.holds is False
    found = decide([Fact("a", True)], requires=[Fact("it learns", True)], also=[shown])
    assert found.word == "holds"
    assert [one.role for one in found.outcomes] == ["precondition", "condition", "part"]


def test_a_verdict_quotes_the_condition_and_what_was_observed() -> None:
    found = decide([Fact("half are right", False, "0.1"), Fact("b", True)])
    assert found.why == "1 of 2 conditions is refuted: “half are right” (observed: 0.1); the other one is met"


def test_a_verdict_counts_all_conditions() -> None:
    met, refuted, undecided = Fact("a", True), Fact("b", False, "0.1"), Fact("c", None)
    assert decide([met, met, met], requires=[met]).why == "the precondition and all 3 conditions are met"
    assert decide([met], requires=[met, met]).why == "both preconditions and its condition are met"
    assert decide([met]).why == "its condition is met"
    assert decide([met, met, undecided]).why == "1 of 3 conditions is undecided: “c”; the other 2 are met"
    assert decide([met, refuted, undecided]).why.endswith("; of the others 1 is met and 1 is undecided")
    assert decide([undecided, undecided]).why == "2 of 2 conditions are undecided: “c”; “c”"


def test_more_comparisons_need_more_evidence() -> None:
    slightly = [1.5, 1.6, 1.7, 1.6, 1.8], [1.2, 1.4, 1.6, 1.5, 1.3]
    assert decide([More("a", *slightly)]).word == "holds"
    none = [Fact(str(i), True) for i in range(9)]
    assert decide([More("a", *slightly), *none]).word == "holds"  # facts are no comparisons
    others = [More(str(i), MIXED, list(reversed(MIXED))) for i in range(9)]
    assert decide([More("a", *slightly), *others]).outcomes[0].holds is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_by_its_definition(ps: list[float]) -> None:
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    for rank, i in enumerate(order):
        expected = max(min(1.0, (len(ps) - k) * ps[order[k]]) for k in range(rank + 1))
        assert holm(ps)[i] == pytest.approx(expected)
    assert all(a >= p for a, p in zip(holm(ps), ps, strict=True))


def test_holm_leaves_out_what_was_not_tested() -> None:
    adjusted = holm([0.01, math.nan, 0.04])
    assert adjusted[0] == pytest.approx(0.02)
    assert math.isnan(adjusted[1])
    assert adjusted[2] == pytest.approx(0.04)


def test_an_effect_is_a_difference_in_standard_deviations() -> None:
    assert hedges([1.0, 3.0], [1.0, 3.0]) == 0
    assert hedges([3.0, 5.0], [1.0, 3.0]) == pytest.approx((1 - 3 / 7) * 2 / math.sqrt(2))
    assert math.isnan(hedges([1.0], [0.0, 1.0]))


def test_a_bound_is_a_test_of_one_sample() -> None:
    (one,) = outcomes_of([More("a", HIGH, 2.0)])
    mean, deviation = statistics.mean(HIGH), statistics.stdev(HIGH)
    assert one.p == pytest.approx(welch(HIGH, [2.0] * 5))
    assert one.effect == pytest.approx((1 - 3 / 15) * (mean - 2) / deviation)  # of five values: 4 degrees of freedom
    assert math.isnan(hedges(HIGH[:2], 2.0))


@pytest.mark.parametrize("other", [[0.3] * 5, 0.3])  # the deviation of five times 0.3 is not exactly 0
@pytest.mark.parametrize(("value", "word"), [(0.7, "holds"), (0.1, "does not hold here")])
def test_without_variation_means_decide_and_no_test_is_shown(
    value: float, word: str, other: list[float] | float
) -> None:
    found = decide([More("a", [value] * 5, other, 0.1)])
    (one,) = found.outcomes
    assert found.word == word
    assert math.isnan(one.p)
    assert math.isnan(one.effect)
    assert one.seen == f"{value - 0.3:+.4f} (no variation over seeds), more than +0.1 expected"
    assert math.isnan(hedges([value] * 5, other))
