"""Rotation leaves no test out, and every case has its turn; files that take longest come first."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests import scheduling
from tests.scheduling import DURATIONS, LONG, SHARE, left_out, order


def case(nodeid: str, rotating: bool = True) -> Any:
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: rotating or None)


@pytest.mark.parametrize("count", [1, 4, 5, 6, 20])
def test_one_case_in_five_runs_and_never_none(count: int) -> None:
    ids = {f"a.py::test_x[{n}]" for n in range(count)}
    out = left_out([case(name) for name in ids], "seed")
    assert out < ids
    assert len(ids - out) == -(-count // SHARE)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Store half a second for the tests of this file."""
    stored = tmp_path / "slow.json"
    tests = ("a.py::test_x", "b.py::test_x", "tests/a.py::test_x", "tests/a.py::test_y", "tests/b.py::test_x")
    stored.write_text(json.dumps(dict.fromkeys(tests, 0.5)), encoding="utf-8")
    monkeypatch.setattr(scheduling, "DURATIONS", stored)


def test_quick_cases_of_a_group_stay() -> None:
    assert left_out([case(f"a.py::quick[{n}]") for n in range(9)], "seed") == set()


def test_files_of_planted_faults_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "WHOLE", {"a.py"})
    assert left_out([case(f"a.py::test_x[{n}]", rotating=False) for n in range(9)], "seed") == set()


def test_tests_without_the_mark_stay() -> None:
    assert left_out([case(f"a.py::quick[{n}]", rotating=False) for n in range(9)], "seed") == set()


def test_groups_name_tests_that_exist() -> None:
    for path in (path for paths in scheduling.ROTATING.values() for path in paths):
        file, _, test = path.partition("::")
        assert f"def {test}" in (DURATIONS.parent / file).read_text(encoding="utf-8"), path


def test_the_tests_of_a_group_rotate_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "ROTATING", {"both": ("a.py", "b.py::test_x")})
    ids = {f"tests/{name}" for name in ("a.py::test_x", "a.py::test_y[1]", "b.py::test_x[0]", "b.py::test_y")}
    for seed in range(20):
        out = left_out([case(name, rotating=False) for name in ids], str(seed))
        assert (len(out), "tests/b.py::test_y" in out) == (2, False)


def test_every_case_has_its_turn_whatever_else_is_collected() -> None:
    items = [case(f"a.py::test_x[{n}]") for n in range(20)]
    turns = [left_out(items, str(seed)) for seed in range(60)]
    assert set.intersection(*turns) == set()
    assert turns == [left_out([case("b.py::test_y[0]"), *reversed(items)], str(seed)) for seed in range(60)]


def test_a_test_of_many_cases_rotates_when_they_take_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    stored = tmp_path / "durations.json"
    stored.write_text(
        json.dumps({"a.py::slow": LONG / 10, "a.py::fast": LONG / 11, "a.py::few": LONG}), encoding="utf-8"
    )
    monkeypatch.setattr(scheduling, "DURATIONS", stored)
    names = [
        f"a.py::{test}[{n}]" for test, count in (("slow", 10), ("fast", 10), ("few", SHARE - 1)) for n in range(count)
    ]
    out = left_out([case(name, rotating=False) for name in names], "seed")
    assert len(out) == 8
    assert all(name.startswith("a.py::slow") for name in out)


def test_files_that_take_longest_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    stored = tmp_path / "durations.json"
    stored.write_text(json.dumps({"b.py::one": 1.0, "b.py::two": 8.0, "c.py::one": 1.0}), encoding="utf-8")
    monkeypatch.setattr(scheduling, "DURATIONS", stored)
    items = [case(name) for name in ("a.py::one", "b.py::one", "b.py::two", "c.py::one", "d.py::one")]
    order(items)
    assert [item.nodeid for item in items] == ["b.py::one", "b.py::two", "c.py::one", "a.py::one", "d.py::one"]
