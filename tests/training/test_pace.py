"""Schedules by time: they use the minutes that are given, without jumps, and a resumed run repeats its places."""

import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.recipe import PARTS, AdamW, Cosine, Train
from anyformer.runs.run import PLACES
from anyformer.training.checkpoint import checkpoints
from anyformer.training.pace import TimedPace
from tests.training.small import PACKED, assert_same_run, metrics, pairs, run

SECONDS = 60.0


class Clock:
    """Time that passes by a given number of seconds at each step, and is otherwise still."""

    def __init__(self, of_step: Callable[[int], float] = lambda _: 0.5):
        self.now, self.of_step, self.steps = 0.0, of_step, 0

    def __call__(self) -> float:
        return self.now

    def step(self) -> None:
        self.now, self.steps = self.now + self.of_step(self.steps), self.steps + 1


def spec(**changes: Any) -> Train:
    return Train(**{"steps": PARTS, "minutes": SECONDS / 60, "optimizer": AdamW(lr=1e-2), **changes})


def walk(pace: TimedPace, clock: Clock, pauses: int = 0, pause: float = 0.0, before: float = 0.0) -> list[float]:
    """Take steps to the end, with evaluations at equal parts of the schedule and at the end; return the places."""
    places = [before]
    while places[-1] < PARTS:
        places.append(pace.enter(len(places), places[-1]))
        clock.step()
        if pauses and (places[-1] == PARTS or places[-2] // (PARTS / pauses) < places[-1] // (PARTS / pauses)):
            with pace.pausing():
                clock.now += pause
    return places[1:]


@given(
    seconds=st.floats(0.05, 2), spread=st.lists(st.floats(0.5, 2), min_size=1, max_size=9), start=st.floats(0, 12),
    first=st.floats(0, 12), pauses=st.integers(0, 4), pause=st.floats(0, 4),
)  # fmt: skip
def test_the_time_is_used_and_not_exceeded(
    tmp_path_factory: pytest.TempPathFactory,
    seconds: float,
    spread: list[float],
    start: float,
    first: float,
    pauses: int,
    pause: float,
) -> None:
    """Whatever steps, preparation, compilation and evaluations take; and no step skips a tenth of the schedule."""
    clock = Clock(lambda step: first if step == 0 else seconds * spread[step % len(spread)])
    pace = TimedPace(tmp_path_factory.mktemp("pace"), spec(), 0, began=0.0, now=clock)
    clock.now = start
    places = walk(pace, clock, pauses, pause)
    assert 0.8 * SECONDS <= clock.now <= 1.1 * SECONDS
    assert places == sorted({*places})
    assert places[-1] == PARTS
    assert max(b - a for a, b in pairwise(places) if b < 0.9 * PARTS) < 0.25 * PARTS


def test_a_machine_that_speeds_up_takes_more_steps(tmp_path: Path) -> None:
    found = []
    for factor in (1.0, 0.25):  # of the time of a step in the second half
        clock = Clock()
        clock.of_step = partial(
            lambda clock, factor, _: 0.5 if clock.now < SECONDS / 2 else 0.5 * factor, clock, factor
        )
        found.append(len(walk(TimedPace(tmp_path, spec(), 0, 0.0, clock), clock)))
        assert clock.now == pytest.approx(SECONDS, rel=0.05)
    assert found[1] == pytest.approx(2.5 * found[0], rel=0.1)


@given(st.integers(1, 100), st.floats(0.1, 10))
def test_recorded_places_are_repeated(tmp_path_factory: pytest.TempPathFactory, kept: int, speed: float) -> None:
    """A later process repeats what is recorded, whatever its own clock says, and then goes on from there."""
    folder, clock = tmp_path_factory.mktemp("pace"), Clock()
    places = walk(TimedPace(folder, spec(), 0, 0.0, clock), clock)
    lines = (folder / PLACES).read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == 1 + len(places)
    (folder / PLACES).write_text("".join(lines[: 1 + kept]) + "12.", encoding="utf-8")  # the process was killed
    other = Clock(lambda _: 0.5 * speed)
    again, found = TimedPace(folder, spec(), 1, 0.0, other), [places[0]]
    while found[-1] < PARTS:
        found.append(again.enter(len(found) + 1, found[-1]))
        other.step()
    assert found[:kept] == places[:kept]
    assert [1.0, *found] == [float(line) for line in (folder / PLACES).read_text(encoding="utf-8").splitlines()]
    assert found == sorted({*found})


def timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training read this clock, on which each batch takes the time of a step."""
    from anyformer.training import loop

    original = loop.read_batches

    def read(*arguments: Any) -> Any:
        clock.step()
        return original(*arguments)

    monkeypatch.setattr(loop, "read_batches", read)
    monkeypatch.setattr(loop, "time", Mock(monotonic=clock))
    monkeypatch.setattr(loop, "TimedPace", partial(TimedPace, now=clock))


def test_a_run_that_is_resumed_at_another_speed_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps, rates, evaluations and weights are those of the recorded run."""
    recipe = pairs(
        "encoder-decoder", PACKED, steps=PARTS, minutes=0.25, schedule=Cosine(warmup=100), evaluate_every=250,
        save_every=10, keep=9,
    )  # fmt: skip
    timed(Clock(lambda step: 0.3 + 0.2 * (step % 3)), monkeypatch)
    run(recipe, whole := tmp_path / "whole")
    rows = metrics(whole)
    assert sum("valid_loss" in row for row in rows) == 4
    shutil.copytree(whole, cut := tmp_path / "cut")
    for path in checkpoints(cut)[1:]:
        shutil.rmtree(path)
    (cut / "manifest.json").unlink()
    monkeypatch.undo()
    timed(Clock(lambda _: 3.0), monkeypatch)
    run(recipe, cut, resume=True)
    assert_same_run(whole, cut)


def test_a_run_goes_on_for_more_minutes_or_for_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that it has used counts; a number of steps counts them all."""
    out, taken = tmp_path / "run", list[int]()
    for length in ({"minutes": 0.1}, {"minutes": 0.2}, {"minutes": None, "steps": 30}, {"minutes": 0.1}):
        timed(Clock(), monkeypatch)
        run(pairs("decoder", PACKED, valid=None, **{"steps": PARTS, **length}), out, resume=bool(taken))
        taken.append(metrics(out)[-1]["step"])
        monkeypatch.undo()
    assert taken == [pytest.approx(12, abs=1), pytest.approx(24, abs=2), 30, pytest.approx(42, abs=2)]


@pytest.mark.parametrize("minutes", [None, 0.5])
def test_each_cycle_ends_with_an_evaluation_at_the_lowest_rate(
    minutes: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(Clock(), monkeypatch)
    length = {"steps": 14} if minutes is None else {"steps": PARTS, "minutes": minutes}
    schedule = Cosine(floor=0.0, cycles=3)
    run(pairs("decoder", PACKED, schedule=schedule, log_every=1, **length), tmp_path / "run")
    rows = metrics(tmp_path / "run")
    rates = {row["step"]: row["lr"] for row in rows if "lr" in row}
    evaluated = [row["step"] for row in rows if "valid_loss" in row]
    assert [step for step, rate in rates.items() if rate == 0] == evaluated
    assert len(evaluated) == 3
    assert minutes or evaluated == [2, 6, 14]


def test_steps_beside_minutes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"steps = 800: with minutes it is 1000, .*; or set train.minutes = none"):
        spec(steps=800)
