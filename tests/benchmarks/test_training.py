"""The ways to train a model that are timed beside each other do the same work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import sheet, training
from benchmarks.sheet import Sheet, Way, agree

WORK: dict[str, tuple[Callable[..., tuple[int, dict[str, Way]]], dict[str, int]]] = {
    "gpt2": (training.gpt2, {"depth": 2, "width": 32, "heads": 2, "vocab": 64, "length": 32, "rows": 2}),
    "base": (training.base, {"depth": 2, "width": 32, "heads": 2, "ff": 64, "vocab": 64, "length": 8, "rows": 4}),
    "bert": (training.bert, {"depth": 2, "width": 32, "heads": 2, "vocab": 64, "length": 32, "rows": 2}),
}


@pytest.mark.parametrize("name", WORK)
def test_all_ways_begin_with_one_loss(name: str) -> None:
    build, sizes = WORK[name]
    _, ways = build(**sizes)
    assert len(ways) > 1
    first = {name: way.first() for name, way in ways.items() if way.first}
    assert first.keys() == ways.keys() - {"x-transformers"}  # which begins with weights of its own
    assert agree(first) is True, first


@pytest.mark.parametrize("name", WORK)
def test_other_weights_are_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those of another seed, even in the tolerance of bf16."""
    build, sizes = WORK[name]
    _, ways = build(**sizes)
    mine = ways["ours"].first
    assert mine is not None
    loss, seed = mine(), torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda _: seed(1))
    monkeypatch.setattr(sheet, "CLOSE", 1e-2)
    assert agree({"ours": loss, "other": mine()}) is False


def machine() -> dict[str, Any]:
    return {"product_flops": 1e9, "copy_bytes": 1e10}


def test_bytes_that_are_read_have_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet, "machine", machine)
    ways = {"ours": Way("ours", lambda: lambda: torch.zeros(()), reads=1e3)}
    rates = Sheet(tmp_path / "cpu.json").measure("work", 1, "tokens/s", ways, warm=0, rounds=1)
    row = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))["work"]
    assert row["share"]["ours"] == pytest.approx(rates["ours"] * 1e3 / 1e10)


def test_ours_may_be_compared_with_another_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet, "machine", machine)
    ways = {name: Way(name, lambda: lambda: torch.zeros(())) for name in ("ours", "ours, dense", "theirs")}
    rates = Sheet(tmp_path / "cpu.json").measure("a", 1, "tokens/s", ways, warm=0, rounds=1, against="ours, dense")
    Sheet(tmp_path / "cpu.json").measure("b", 1, "tokens/s", ways, warm=0, rounds=1)
    rows = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert (rows["a"]["peer_name"], rows["a"]["peer"]) == ("ours, dense", rates["ours, dense"])
    assert rows["a"]["spread"].keys() == rates.keys()
    assert rows["b"]["peer_name"] == "theirs"


@pytest.mark.parametrize("other", [2.0, 2.1])
def test_a_row_tells_whether_they_agree(
    other: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sheet, "machine", machine)
    ways = {
        "ours": Way("ours", lambda: lambda: torch.zeros(()), lambda: 2.0, flops=1e3),
        "theirs": Way("theirs", lambda: lambda: torch.zeros(()), lambda: other, flops=1e3),
    }
    rates = Sheet(tmp_path / "cpu.json").measure("work", 1, "tokens/s", ways, warm=0, rounds=1)
    row = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))["work"]
    assert row["agree"] is (other == 2.0)
    assert row["first"] == {"ours": 2.0, "theirs": other}
    assert row["share"]["ours"] == pytest.approx(rates["ours"] * 1e3 / 1e9)
    assert ("DISAGREE" in capsys.readouterr().out) is (other != 2.0)


def test_a_peer_that_cannot_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its first loss fails or its first step."""

    def fails() -> Any:
        raise RuntimeError("not here")

    monkeypatch.setattr(sheet, "machine", machine)
    step = Way("a way", lambda: lambda: torch.zeros(()), lambda: 2.0)
    ways = {"ours": step, "no loss": Way("a way", step.make, fails), "no step": Way("a way", fails, step.first)}
    rates = Sheet(tmp_path / "cpu.json").measure("work", 1, "tokens/s", ways | {"peer": step}, warm=0, rounds=1)
    assert rates.keys() == {"ours", "peer"}
    assert json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))["work"]["first"].keys() == rates.keys()
    told = capsys.readouterr().out
    assert all(f"{name} cannot run here: not here" in told for name in ("no loss", "no step"))
    with pytest.raises(RuntimeError, match="not here"):
        Sheet(tmp_path / "cpu.json").measure("work", 1, "tokens/s", {"ours": ways["no loss"]}, warm=0, rounds=1)
