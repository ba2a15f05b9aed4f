"""The benchmark of mixers: every mixer is timed, and a crossover is where the times meet."""

import pytest

from benchmarks import mixers


def test_every_mixer_is_timed() -> None:
    names = list(mixers.mixers(16))
    rows = list(mixers.time_layers({"eager": (8, 16)}, 16, 16, "cpu", names, rounds=1))
    assert [(row["mixer"], row["length"], row["rows"]) for row in rows] == [
        (name, length, 16 // length) for name in names for length in (8, 16)
    ]
    assert all(min(row["forward"]["ms"], row["step"]["ms"]) > 0 for row in rows)
    assert [one["mixer"] for one in mixers.crossovers(rows)] == names[1:]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([(1, 4.0), (4, 1.0), (16, 0.25)], 4.0),
        ([(1, 2.0), (4, 0.5)], 2.0),
        ([(1, 0.5), (4, 0.2)], 1.0),
        ([(1, 3.0), (4, 2.0)], None),
        ([], None),
    ],
)
def test_a_crossover_is_where_the_ratio_is_one(ratios: list[tuple[int, float]], expected: float | None) -> None:
    assert mixers.crossing(ratios) == (None if expected is None else pytest.approx(expected))
