"""The report of a machine: its choices are those of training, and this machine can be reported."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import anyformer as af
from anyformer.cli import app
from anyformer.config import ConfigError, io
from anyformer.kernels.hardware import busy_advice
from anyformer.nn.transforms.substitute import TABLE
from anyformer.recipe.ready import read_recipe
from anyformer.training import machine
from anyformer.training.doctor import (
    CORE,
    EXTRAS,
    Device,
    DoctorReport,
    Machine,
    MachineFacts,
    choose,
    choose_attention,
    doctor,
)
from anyformer.training.machine import ReasonedChoice, choose_compile, choose_precision
from anyformer.training.make_task import make_task
from anyformer.training.prepare import build, fit_rows, read_rows

CPU = Device("cpu", "Neoverse-N1", None, None, {"fp32": 60.0, "bf16": 0.2, "fp16": 0.3})
GPU = Device("cuda:0", "NVIDIA H200", 139 * 2**30, "9.0", {"fp32": 50e3, "bf16": 700e3, "fp16": 700e3})
LAPTOP = MachineFacts(
    machine=Machine("Linux 6.1", "Neoverse-N1", 2, 2, 8 * 2**30),
    python="3.11.7",
    versions=dict.fromkeys(CORE, "1.0"),
    devices=(CPU,),
    kernels={"eager": None, "sdpa": None},
    compiler="/usr/bin/c++",
    triton=None,
    missing={"log": ("tensorboard",)},
)
SERVER = replace(
    LAPTOP,
    devices=(GPU, replace(GPU, name="cuda:1"), CPU),
    kernels={"eager": None, "sdpa": None, "sdpa: flash": None, "sdpa: cudnn": "not built in"},
    triton="3.6.0",
    missing={},
)


def with_gpu(monkeypatch: pytest.MonkeyPatch, *, bf16: bool = True, fault: str | None = None) -> None:
    """Let torch report a CUDA GPU on this machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(machine, "compiler_fault", lambda: fault)


def values(facts: MachineFacts) -> dict[str, str]:
    return {name: choice.value for name, choice in choose(facts).items()}


def test_choices_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert values(LAPTOP) == {"device": "cpu", "precision": "fp32", "attention": "sdpa", "compile": "off"}


def test_choices_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch)
    assert values(SERVER) == {"device": "cuda", "precision": "bf16", "attention": "sdpa", "compile": "on"}
    assert choose(SERVER)["attention"].reason == "fused kernels: flash"
    with_gpu(monkeypatch, bf16=False, fault="triton is not installed")
    assert values(SERVER)["precision"] == "fp32"
    assert choose(SERVER)["compile"] == ReasonedChoice("off", "triton is not installed")


def test_training_follows_the_report() -> None:
    """A recipe that leaves the choices to anyformer is trained as `anyformer doctor` prints."""
    recipe = io.override(read_recipe("sort"), ["batches={kind='packed', tokens=256, length=32}"])
    assert (recipe.train.precision, recipe.train.compile) == ("auto", "auto")
    console = Console(quiet=True)
    splits = read_rows(recipe)
    task = make_task(recipe, splits["train"], console)
    job = build(recipe, Path(), task, *fit_rows(recipe, task, splits, console), console)
    printed = {name: choice.value for name, choice in doctor().choices.items()}
    assert job.device.type == printed["device"]
    assert job.precision == printed["precision"]
    assert job.compiled == (printed["compile"] == "on")


def test_attention_falls_back_to_eager() -> None:
    assert choose_attention({"eager": None, "sdpa": "its result differs from eager's"}).value == "eager"


@pytest.mark.parametrize(
    ("device", "shapes", "fault", "expected"),
    [
        ("cuda", 1, None, "on"),
        ("cuda", 2, None, "off"),
        ("cuda", 1, "no C or C++ compiler found", "off"),
        ("cpu", 1, None, "off"),
        ("mps", 1, None, "off"),
    ],
)
def test_compilation(device: str, shapes: int, fault: str | None, expected: str) -> None:
    assert choose_compile("auto", torch.device(device), shapes, fault).value == expected
    for setting in ("on", "off"):
        assert choose_compile(setting, torch.device(device), shapes, fault).value == setting


def test_precision_of_a_recipe() -> None:
    """A precision that is set is used; fp8 needs hardware for it."""
    for setting in ("fp32", "bf16", "fp16"):
        assert choose_precision(setting, torch.device("cpu")).value == setting
    with pytest.raises(ConfigError, match=r"train.precision = 'fp8': needs a GPU .* this is the CPU: use 'auto'"):
        choose_precision("fp8", torch.device("cpu"))


def test_each_extra_is_imported_by_the_package() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(af.__file__).parent.rglob("*.py"))
    imported = set(re.findall(r"(?:import|from) (\w+)|import_module\(\"(\w+)", text))
    modules = {one for pair in imported for one in pair} | {"tensorboard" if "torch.utils.tensorboard" in text else ""}
    names = {"pillow": "PIL", "lm-eval": "lm_eval"}
    for extra, packages in EXTRAS.items():
        assert [one for one in packages if names.get(one, one) in modules], extra


def test_printed_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = DoctorReport(LAPTOP, choose(LAPTOP)).render()
    assert "  cpu     Neoverse-N1, 2 cores, torch uses 2 threads\n  memory  8.0 GiB\n" in text
    assert "  log  pip install 'anyformer[log]'  (tensorboard)\n" in text
    assert text.endswith("  compile    off  (on cpu compilation takes tens of seconds and gains little)")
    text = DoctorReport(SERVER, choose(SERVER)).render()
    assert "  cuda:0  NVIDIA H200, 139.0 GiB, capability 9.0\n" in text
    assert (
        "  cuda:0  fp32 50 TFLOP/s (75% of its peak), bf16 700 TFLOP/s (71% of its peak), "
        "fp16 700 TFLOP/s (71% of its peak)\n" in text
    )
    assert "  cpu     fp32 60 GFLOP/s, bf16 0.2 GFLOP/s, fp16 0.3 GFLOP/s\n" in text
    assert "missing extras\n  none  all are installed\n" in text


def test_this_machine() -> None:
    report = doctor()
    assert report.facts.devices[-1].name == "cpu"
    assert report.facts.kernels["eager"] is None
    assert report.facts.kernels["sdpa"] is None
    assert report.facts.devices[-1].speeds["fp32"]
    assert report.facts.versions["torch"]
    assert set(report.choices) == {"device", "precision", "attention", "compile"}
    assert report.modules.keys() == {plain.__name__ for plain in TABLE}
    printed = CliRunner().invoke(app, ["doctor", "--json"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout)["facts"]["python"] == report.facts.python


def test_packages_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=!~ ;\[]", r)[0] for r in requirements} - {"anyformer"}

    assert set(CORE) == names(project["dependencies"])
    extras = {extra: names(requirements) for extra, requirements in project["optional-dependencies"].items()}
    assert {extra: set(packages) for extra, packages in EXTRAS.items()} == {
        extra: packages for extra, packages in extras.items() if extra not in ("dev", "dev-all", "docs")
    }


def test_a_busy_machine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load, threads, told in ((6.6, 2, True), (6.6, 1, False), (2.1, 2, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        for policy, advice in (("", "start Python with OMP_WAIT_POLICY=passive"), ("PASSIVE", "training takes longer")):
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
            line = busy_advice(threads)
            assert (line or "").startswith(f"this machine is busy (load 6.6 on 2 cores): {advice}") is told


def test_idle_threads_of_the_program_sleep() -> None:
    """The policy is set before torch loads OpenMP, and not over the user's own."""
    code = (
        "import os, sys; from anyformer.cli import main; module = sys.modules[main.__module__]; "
        "module.app = lambda **_: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules); main()"
    )
    for given, expected in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert result.stdout == f"{expected} False\n"
