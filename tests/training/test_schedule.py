"""The schedules are their formulae, begin at a step's worth of warm-up, never jump, and end where they say."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from anyformer.recipe import MAX_CYCLES, WSD, Constant, Cosine, InverseSqrt, LinearDecay, Schedule

floors = st.floats(0, 1)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A schedule, and the number of steps, which the warm-up may exceed."""
    part = draw(st.sampled_from(Schedule.choices()))
    given = {"warmup": draw(st.integers(1, 60)), "floor": draw(floors), "decay": draw(st.floats(0.01, 1))}
    made = part(**{name: value for name, value in given.items() if name in part.model_fields})
    return made, draw(st.integers(1, 100))


@given(schedules())
def test_the_rate_rises_to_the_peak_and_then_only_falls(drawn: tuple[Schedule, int]) -> None:
    schedule, steps = drawn
    rates = [schedule.at(step, steps) for step in range(1, steps + 1)]
    assert all(0 <= r <= 1 for r in rates)
    for step, r in enumerate(rates[: schedule.warmup], 1):
        assert r == pytest.approx(step / schedule.warmup)
    after = rates[max(schedule.warmup - 1, 0) :]
    assert all(b <= a + 1e-12 for a, b in pairwise(after))


@given(schedules(), st.integers(200, 400))
def test_nothing_jumps(drawn: tuple[Schedule, int], stretch: int) -> None:
    """A hundred times the steps and the warm-up: a step then moves the rate by little."""
    schedule, steps = drawn
    warmup, steps = schedule.warmup * stretch, max(steps, schedule.warmup + 1) * stretch
    schedule = schedule.model_copy(update={"warmup": warmup})
    decay = schedule.decay if isinstance(schedule, WSD) else 1.0
    shortest = min(x for x in (warmup, steps - warmup, steps * decay) if x > 0)
    most = 2 / max(1.0, shortest)  # a cosine is pi / 2 times as steep as a line
    for step in {1, warmup, warmup + 1, int(steps * (1 - decay)), int(steps * (1 - decay)) + 1, steps - 1} - {0}:
        if step + 1 <= steps:
            assert abs(schedule.at(step + 1, steps) - schedule.at(step, steps)) <= most + 1e-12


@given(st.integers(0, 50), st.integers(51, 200), floors)
def test_ends(warmup: int, steps: int, floor: float) -> None:
    assert Constant(warmup=warmup).at(steps, steps) == 1
    assert LinearDecay(warmup=warmup, floor=floor).at(steps, steps) == pytest.approx(floor)
    assert Cosine(warmup=warmup, floor=floor).at(steps, steps) == pytest.approx(floor)
    assert WSD(warmup=warmup, floor=floor).at(steps, steps) == pytest.approx(floor)


@given(st.integers(8, 1024), st.integers(1, 8000), st.integers(1, 100_000))
def test_the_schedule_of_2017(d: int, warmup: int, step: int) -> None:
    peak = (d * warmup) ** -0.5
    expected = d**-0.5 * min(step**-0.5, step * warmup**-1.5)
    assert peak * InverseSqrt(warmup=warmup).at(step, 100_000) == pytest.approx(expected)


@given(st.integers(1, 40), st.integers(41, 200))
def test_line_and_cosine_are_halfway_at_half_the_way(warmup: int, half: int) -> None:
    steps = warmup + 2 * half
    for schedule in (LinearDecay(warmup=warmup, floor=0.2), Cosine(warmup=warmup, floor=0.2)):
        assert schedule.at(warmup + half, steps) == pytest.approx(0.6)
    quarter = Cosine(warmup=0, floor=0.0).at(half, 4 * half)
    assert quarter == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_wsd_is_flat_and_then_a_line() -> None:
    schedule = WSD(warmup=10, decay=0.2, floor=0.5)
    rates = [schedule.at(step, 100) for step in range(1, 101)]
    assert rates[9:80] == [1.0] * 71
    assert rates[80:] == pytest.approx([1 - 0.5 * n / 20 for n in range(1, 21)])
    # where the warm-up reaches into the decay, the decay begins at its end
    assert WSD(warmup=90, decay=0.2).at(91, 100) == pytest.approx(0.9)


@given(st.integers(1, MAX_CYCLES), st.integers(0, 3), floors, st.integers(2**MAX_CYCLES, 3000))
def test_each_cycle_is_a_schedule_of_its_own(cycles: int, warmup: int, floor: float, steps: int) -> None:
    """It falls from the peak to the floor, as one cycle of its length does, and is twice as long as the one before."""
    schedule = Cosine(warmup=warmup, floor=floor, cycles=cycles)
    ends = [0, *schedule.cycle_ends(steps)]
    assert ends[-1] == steps
    lengths = [b - a for a, b in pairwise(ends)]
    assert all(b == pytest.approx(2 * a, abs=3) for a, b in pairwise(lengths))
    for number, (begin, end) in enumerate(pairwise(ends)):
        one = Cosine(warmup=0 if number else min(warmup, end), floor=floor)
        for step in {begin + 1, (begin + end) // 2, end} - {begin}:
            expected = one.at(step - begin, end - begin)
            assert schedule.at(step, steps) == pytest.approx(expected)
        assert schedule.at(end, steps) == pytest.approx(floor if end > warmup or number else end / warmup)
