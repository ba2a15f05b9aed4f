"""How a step grows is measured and foretold at the same sizes."""

import json
from pathlib import Path

import pytest

from anyformer.training.objective import Objective
from benchmarks import growth, report

BASE = growth.Sizes(length=32, batch=2, width=32, depth=2, vocab=128)


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    axes = {"length": (32, 64), "batch": (2, 4), "width": (32, 64), "depth": (1, 2), "vocab": (128, 256)}
    *_, last = growth.grow(axes, BASE, product=1e10, warm=0, rounds=1)
    return last


def test_saved_activations_match_the_prediction(found: dict) -> None:  # type: ignore[type-arg]
    for axis, points in growth.predicted(found, gpu=False).items():
        for point in points:
            assert point["bytes"] == pytest.approx(point["due_bytes"], rel=0.05), (axis, point)


def test_the_base_is_where_time_is_fitted(found: dict) -> None:  # type: ignore[type-arg]
    for axis, points in growth.predicted(found, gpu=False).items():
        (base,) = (point for point in points if point["size"] == found["base"][axis])
        assert base["due_seconds"] == pytest.approx(base["seconds"])


def test_gpu_memory_is_predicted_without_a_gpu(found: dict) -> None:  # type: ignore[type-arg]
    here, there = (growth.predicted(found, gpu)["depth"] for gpu in (False, True))
    assert [p["bytes"] for p in here] == [p["bytes"] for p in there]
    assert all(more["due_bytes"] > less["due_bytes"] for less, more in zip(here, there, strict=True))


def test_the_figure_and_its_words(found: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[type-arg]
    monkeypatch.setattr(report, "DOCS", tmp_path)
    assert report.draw_growth("cpu", json.loads(json.dumps(found))).stat().st_size > 10_000
    assert "figures/growth-cpu.png" in report._growth("cpu", found)


def test_a_power_is_found() -> None:
    assert report.power([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_the_head_computes_the_loss(monkeypatch: pytest.MonkeyPatch):
    """As in training, where logits are never kept whole."""
    made = []
    monkeypatch.setattr(growth, "Objective", lambda *args: made.append(Objective(*args)) or made[0])
    growth.make(BASE)
    assert [objective.fused for objective in made] == [True]
