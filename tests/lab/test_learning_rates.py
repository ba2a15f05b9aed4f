"""A best learning rate at an end of those tried leaves a claim undecided, whatever else was found."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from anyformer.lab.cells import Cell, CellResult
from anyformer.lab.decision import Fact, More, Side, decide, require_inside
from anyformer.lab.experiment import SIZES, Experiment, Size, find
from anyformer.lab.rules import tries_rates
from tests.lab.made_up import NAMES
from tests.lab.test_experiments import HOLDS

TUNED = [(name, size) for name in NAMES for size in SIZES if tries_rates(find(name).cells(size))]
KEPT = ("curve", "lr", "gradient", "gradients", "valid", "shares")  # no scores
losses = st.lists(st.floats(0.1, 9), min_size=2, max_size=5)
sides = st.dictionaries(st.floats(1e-5, 1), losses, min_size=1, max_size=6)


@given(st.lists(sides, max_size=4), st.booleans(), st.lists(st.sampled_from([True, False, None]), min_size=1))
def test_a_best_rate_at_an_end_leaves_any_verdict_undecided(
    tried: list[dict[float, list[float]]], higher: bool, met: list[bool | None]
) -> None:
    before = decide([Fact(str(i), one) for i, one in enumerate(met)])
    after = require_inside(before, [Side(str(i), scores, higher) for i, scores in enumerate(tried)])
    grids = [scores for scores in tried if len(scores) > 1]
    if all(_is_inside(scores, higher) for scores in grids):
        assert after.word == before.word
        assert len(after.outcomes) == len(before.outcomes) + bool(grids)
    else:
        assert after.word == "undecided at this size"
        assert after.outcomes[1:] == before.outcomes


def _is_inside(scores: Mapping[float, list[float]], higher: bool) -> bool:
    """Test whether some rate between the ends is as good as both of them."""
    means = [fmean(scores[rate]) * (-1 if higher else 1) for rate in sorted(scores)]
    return min(means[1:-1], default=math.inf) <= min(means)


@given(sides, st.booleans())
def test_the_best_rate_has_the_best_mean(scores: dict[float, list[float]], higher: bool) -> None:
    means = {rate: fmean(some) for rate, some in scores.items()}
    assert means[Side("", scores, higher).best] == (max if higher else min)(means.values())


def test_a_wider_range_decides() -> None:
    met = decide([More("a", [2.0, 2.1, 2.2], [1.0, 1.1, 1.2])])
    narrow = {0.01: [0.5, 0.6], 0.1: [0.3, 0.4]}
    assert require_inside(met, [Side("a", narrow)]).word == "undecided at this size"
    assert require_inside(met, [Side("a", {**narrow, 1.0: [0.6, 0.5]})]).word == "holds"
    assert require_inside(met, [Side("a", {**narrow, 1.0: [math.inf]})]).word == "holds"  # a training that diverged
    assert require_inside(met, [Side("a", {0.1: [0.3]})]).word == "holds"  # a claim about one rate


@pytest.mark.parametrize(("name", "size"), TUNED)
def test_a_claim_can_be_decided_by_the_rates_that_it_tries(name: str, size: Size) -> None:
    """Two rates are both ends: a range with an inside has three or more, of each side."""
    experiment = find(name)
    found = [CellResult(dict(cell), HOLDS[name](cell), 0.0, "made up") for cell in experiment.cells(size)]
    assert min(len(side.scores) for side in experiment.sides(found)) >= 3
    assert experiment.verdict(found) != experiment.judge(found)
    assert experiment.verdict(found).outcomes[0].holds


@pytest.mark.parametrize(("name", "size"), TUNED)
@settings(max_examples=4, deadline=None)
@given(slope=st.sampled_from([-1.0, 1.0]), scale=st.floats(2, 9))
def test_every_claim_with_several_rates_is_undecided_where_the_best_is_at_an_end(
    name: str, size: Size, slope: float, scale: float
) -> None:
    """Whatever a claim measures, it rises or falls with the rate so steeply that the best one is at an end."""
    experiment = find(name)
    found = _monotone(experiment, size, slope * scale)
    outcome, *_ = experiment.verdict(found).outcomes
    assert experiment.verdict(found).word == "undecided at this size"
    assert outcome.seen.count(" tried") == len(experiment.sides(found)) > 1


def _monotone(experiment: Experiment, size: Size, slope: float) -> list[CellResult]:
    """Return made-up results, shifted by the logarithm of the learning rate."""

    def shifted(name: str, value: Any, by: float) -> Any:
        if isinstance(value, list) and name not in KEPT:
            return [shifted(name, one, by) for one in value]
        return value + by if isinstance(value, float) and name not in KEPT else value

    def result(cell: Cell) -> CellResult:
        by = slope * math.log(cell["lr"] if "lr" in cell else cell.get("rates", [1.0])[0])
        found = {name: shifted(name, value, by) for name, value in HOLDS[experiment.kind](cell).items()}
        return CellResult(dict(cell), found, 0.0, "made up")

    return list(map(result, experiment.cells(size)))


def test_every_claim_with_sides_has_several_rates_at_some_size() -> None:
    assert {name for name, _ in TUNED} == {name for name in NAMES if type(find(name)).sides is not Experiment.sides}


@pytest.mark.parametrize("name", sorted({name for name, _ in TUNED}))
def test_a_size_with_one_rate_has_no_such_condition(name: str) -> None:
    for size in SIZES:
        if (name, size) not in TUNED:
            found = [CellResult(dict(cell), HOLDS[name](cell), 0.0, "made up") for cell in find(name).cells(size)]
            assert find(name).verdict(found) == find(name).judge(found)


def test_the_rule_for_learning_rates_is_part_of_the_hash_where_there_are_several() -> None:
    encoder_decoder = find("encoder_decoder")
    one, two = (encoder_decoder.cells(size) for size in ("cpu", "gpu"))
    assert encoder_decoder.rule(one) != encoder_decoder.rule(two)
    assert find("heads").rule(find("heads").cells("cpu")) == find("heads").rule(find("heads").cells("gpu"))
