"""The steps that `benchmarks.plan` measures, and the forecasts beside them."""

import json

import pytest
import torch

from anyformer.kernels.gpu_table import GPUS
from anyformer.training.forecast.estimate import forecast
from anyformer.training.forecast.split import Split
from benchmarks import plan
from benchmarks.sheet import RESULTS

CASES = plan.cases(tiny=True)


@pytest.mark.parametrize("name", ["gpt2-124m", "bert-base", "transformer-base", "vit-base"])
def test_a_step_is_measured_beside_its_forecast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in ("WARM", "ROUNDS", "EACH"):
        monkeypatch.setattr(plan, number, 1)
    row = {"forecast": CASES[name].forecast(), "measured": plan.measure(CASES[name])}
    assert row["forecast"]["bytes"] > 0
    assert 0 < row["forecast"]["seconds"] < row["measured"]["seconds"]  # an H200 beside a CPU
    assert plan.line(name, row).startswith(name)


def test_a_step_trains() -> None:
    step = plan.make_step(CASES["gpt2-124m"])
    first = step()
    for _ in range(3):
        last = step()
    assert torch.isfinite(last)
    assert last < first


def test_the_large_cases_fit_side_by_side() -> None:
    """All are prepared at once on a GPU of 139 GiB."""
    large = plan.cases(tiny=False)
    assert large.keys() == CASES.keys()
    assert sum(case.forecast()["bytes"] for case in large.values()) < 115 * 2**30


def test_forecasts_are_close_to_measurements() -> None:
    """On an H200: within 15 % of the peak memory, and within 25 % of the time of a step."""
    measured = json.loads((RESULTS / "plan.json").read_text(encoding="utf-8"))
    large = plan.cases(tiny=False)
    assert measured.keys() - large.keys() == {"machine"}
    for name in measured.keys() & large.keys():
        told, found = forecast(large[name].workload, GPUS["h200"], Split(rows=large[name].batch)), measured[name]
        assert told.memory == pytest.approx(found["bytes"], rel=0.15), name
        assert told.seconds == pytest.approx(found["seconds"], rel=0.25), name
