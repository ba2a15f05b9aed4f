"""The steps that `benchmarks.plan` measures, and the forecasts beside them."""

import pytest
import torch

from benchmarks import plan

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
