"""What is written and shown while training: metrics, speed against the hardware, TensorBoard where it is there."""

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from anyformer.config import ModelConfig
from anyformer.data.batch import Batch
from anyformer.kernels.gpu_table import GPUS
from anyformer.kernels.hardware import peak_flops, stated_flops
from anyformer.nn.inspection.count import count
from anyformer.recipe import TensorBoard
from anyformer.training import log as module
from anyformer.training.log import Log, SilentLog, is_improving
from anyformer.training.loop import fit
from anyformer.training.machine import flops_per_token, peak_tokens_per_second
from tests.training.small import make, model, pairs, quiet, said


class Clock:
    """A second for every step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def without_tensorboard(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "board" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it fails


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_speed_is_that_of_the_last_steps(tmp_path: Path, clock: Clock) -> None:
    with Log(tmp_path, 200, 0, quiet(), 1) as log:
        clock.now += 100  # compiling
        log.step(1, 1.0, 0.1, 1.0, 50)
        for step in range(2, 101):
            clock.now += 1
            log.step(step, 1.0, 0.1, 1.0, 50)
        with log.evaluating(100):
            clock.now += 1000
        clock.now += 2
        log.step(101, 1.0, 0.1, 1.0, 50)
    speeds = [row["tokens_per_second"] for row in rows(tmp_path) if "tokens_per_second" in row]
    assert speeds[0] < 1
    assert speeds[99] == 50
    assert speeds[100] == 25  # an evaluation is no training
    assert not (tmp_path / "tensorboard").exists()


def test_the_rest_of_the_time_is_that_of_the_last_seconds(tmp_path: Path, clock: Clock) -> None:
    with Log(tmp_path, 1000, 0, console := quiet(), 1000) as log:
        for step in range(1, 101):
            clock.now += 10 if step <= 50 else 1  # another program ends
            log.step(step, 1.0, 0.1, 1.0, 50)
    assert said(console).splitlines()[-1].endswith("50 tokens/s  902 s left")


def test_the_last_evaluation_is_announced(tmp_path: Path, clock: Clock) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    for console, expected in ((terminal, 2), (quiet(), 1)):  # a short one only on the bar
        with Log(tmp_path, 2, 0, console, 1) as log:
            for step in (1, 2):
                clock.now += 1
                log.step(step, 1.0, 0.1, 1.0, 50)
                with log.evaluating(step):
                    log.bar.refresh()
        assert said(console).count("evaluating …") >= expected
    assert said(console).splitlines()[-1] == "step 2/2  evaluating …"


def test_other_processes_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with SilentLog() as log:
        log.drop_after(0)
        log.step(1, 1.0, 0.1, 1.0, 50)
        with log.evaluating(1):
            log.evaluation(1, "valid", {"loss": 1.0})
    assert not [*tmp_path.iterdir()]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("loss", [4.4, 3.8, 3.7], True),
        ("bleu", [3.5, 10.5, 11.4], True),
        ("loss", [2.0, 1.0, 0.999], False),  # hardly
        ("loss", [2.0, 1.0, 1.1], False),  # worse
        ("accuracy", [0.98, 0.99, 0.99], False),
        ("loss", [4.4], False),  # nothing to compare it with
        ("loss", [], False),
    ],
)
def test_a_run_that_still_improves(tmp_path: Path, metric: str, values: list[float], expected: bool) -> None:
    with Log(tmp_path, 300, 0, quiet(), 1) as log:
        for step, value in zip((100, 200, 300), values, strict=False):
            log.evaluation(step, "valid", {metric: value})
    assert is_improving(tmp_path, metric) is expected


def test_the_share_of_the_peak(tmp_path: Path, clock: Clock) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    for console in (terminal, quiet()):
        with Log(tmp_path, 1, 0, console, 1, at_peak=200.0) as log:
            clock.now += 1
            log.step(1, 2.5, 0.1, 1.0, 50)
        assert "loss 2.500  50 tokens/s, 25.0% of the peak" in said(console)
        assert rows(tmp_path)[-1]["peak_share"] == 0.25
    with Log(tmp_path, 1, 0, console := quiet(), 1) as log:
        clock.now += 1
        log.step(1, 2.5, 0.1, 1.0, 50)
    assert "peak" not in said(console)
    assert "peak_share" not in rows(tmp_path)[-1]


# -- against the hardware ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5e12),
        ("NVIDIA L4", "fp16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Neoverse-N1", "fp32", None),
    ],
)
def test_stated_peaks(label: str, precision: str, expected: float | None) -> None:
    assert stated_flops(label, precision) == expected


def test_every_name_in_the_table_is_found() -> None:
    for gpu in GPUS.values():
        assert {precision: stated_flops(f"NVIDIA {gpu.label}", precision) for precision in gpu.flops} == gpu.flops


def test_an_unknown_device_is_measured() -> None:
    measured = peak_flops("Neoverse-N1", "cpu", "fp32")
    assert measured is not None
    assert 1e8 < measured < 1e14


@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_tokens_at_the_peak(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At that speed the forward pass, three times, takes all FLOPs of the device."""
    config = model(shape)
    ends = {name: side.model_copy(update={"vocab": 50}) for name, side in _ends(config)}
    config = config.model_copy(update=ends)
    ids = torch.zeros(4, 16, dtype=torch.long)
    source = torch.zeros(4, 24, dtype=torch.long) if shape == "encoder-decoder" else None
    batch = Batch(ids, ids, None, source)
    whole = count(config, 16, batch=4, source_length=None if source is None else 24).flops
    assert flops_per_token(config, batch) * batch.slots == pytest.approx(3 * whole)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    at_peak = peak_tokens_per_second(config, batch, torch.device("cuda"), "bf16")
    assert at_peak is not None
    assert at_peak * 3 * whole / batch.slots == pytest.approx(312e12)


def _ends(config: ModelConfig) -> list[tuple[str, Any]]:
    return [(name, getattr(config, name)) for name in ("source", "target") if getattr(config, name) is not None]


# -- TensorBoard ------------------------------------------------------------------------------------------------------


@pytest.fixture
def board() -> Any:
    return pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator


def shown(board: Any, folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = board(str(folder / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_shows_what_metrics_hold(tmp_path: Path, board: Any) -> None:
    fit(make(pairs(steps=4), tmp_path / "run"))
    found = shown(board, tmp_path / "run")
    assert {"loss", "lr", "grad_norm", "tokens_per_second", "valid_loss"} <= found.keys()
    written = [(row["step"], row["loss"]) for row in rows(tmp_path / "run") if "loss" in row]
    assert found["loss"] == [(step, pytest.approx(loss)) for step, loss in written]


def test_steps_that_are_done_again_are_shown_once(tmp_path: Path, board: Any) -> None:
    for start, value in ((0, 1.0), (3, 2.0)):  # the first dies after step 5, its last checkpoint being of step 3
        time.sleep(1 - time.time() % 1)  # files are sorted by the second in their names; within one 10 is before 9
        with Log(tmp_path, 6, start, quiet(), 1, loggers=[TensorBoard()]) as log:
            for step in range(start + 1, start + 6 if start == 0 else 7):
                log.write(step, loss=value)
    assert shown(board, tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
