"""What anyformer would choose, by made-up machines; and that looking at this one works."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.doctor import (
    CORE,
    EXTRAS,
    Device,
    Facts,
    Machine,
    Report,
    choose,
    choose_attention,
    choose_compile,
    choose_precision,
    doctor,
)

CPU = Device("cpu", "Neoverse-N1", None, None, {"fp32": 60.0, "bf16": 0.2, "fp16": 0.3})
GPU = Device("cuda:0", "NVIDIA H200", 139 * 2**30, "9.0", {"fp32": 50e3, "bf16": 700e3, "fp16": 700e3})
LAPTOP = Facts(
    machine=Machine("Linux 6.1", "Neoverse-N1", 2, 2, 8 * 2**30),
    python="3.11.7",
    versions=dict.fromkeys(CORE, "1.0"),
    devices=(CPU,),
    kernels={"eager": None, "sdpa": None},
    compiler="/usr/bin/c++",
    triton=None,
    missing={"spm": ("sentencepiece",)},
)
SERVER = replace(
    LAPTOP,
    devices=(GPU, replace(GPU, name="cuda:1"), CPU),
    kernels={"eager": None, "sdpa": None, "sdpa: flash": None, "sdpa: cudnn": "not built in"},
    triton="3.6.0",
    missing={},
)


def values(facts: Facts) -> dict[str, str]:
    return {name: choice.value for name, choice in choose(facts).items()}


def test_a_laptop() -> None:
    assert values(LAPTOP) == {"device": "cpu", "precision": "fp32", "attention": "sdpa", "compile": "off"}
    assert choose(LAPTOP)["precision"].reason == "bf16 is 300 times slower on cpu"


def test_a_server() -> None:
    assert values(SERVER) == {"device": "cuda:0", "precision": "bf16", "attention": "sdpa", "compile": "on"}
    assert choose(SERVER)["precision"].reason == "14.0 times faster than fp32 on cuda:0"
    assert choose(SERVER)["attention"].reason == "fused kernels: flash"


@pytest.mark.parametrize(
    ("fp32", "bf16", "expected"),
    [(10.0, 20.0, "bf16"), (10.0, 11.0, "fp32"), (10.0, 10.0, "fp32"), (10.0, None, "fp32"), (None, None, "fp32")],
)
def test_precision(fp32: float | None, bf16: float | None, expected: str) -> None:
    # fp16 is never chosen, however fast: it overflows where fp32 does not
    device = replace(GPU, speeds={"fp32": fp32, "bf16": bf16, "fp16": 1e9})
    assert choose_precision(device).value == expected


def test_attention_falls_back_to_the_definition() -> None:
    assert choose_attention({"eager": None, "sdpa": "its result differs from eager's"}).value == "eager"


def test_compile_needs_its_tools() -> None:
    assert choose_compile(GPU, "/usr/bin/c++", "3.6").value == "on"
    assert choose_compile(GPU, None, "3.6").reason == "no C++ compiler found: install g++ or clang++"
    assert choose_compile(GPU, "/usr/bin/c++", None).reason == "triton is missing"
    assert choose_compile(replace(GPU, name="mps"), "/usr/bin/c++", "3.6").value == "off"


def test_what_is_printed() -> None:
    text = Report(LAPTOP, choose(LAPTOP)).render()
    assert "  cpu     Neoverse-N1, 2 cores, torch uses 2 threads\n  memory  8.0 GiB\n" in text
    assert "  spm  pip install 'anyformer[spm]'  (sentencepiece)\n" in text
    assert text.endswith("  compile    off  (on cpu it takes tens of seconds and gains little)")
    text = Report(SERVER, choose(SERVER)).render()
    assert "  cuda:0  NVIDIA H200, 139.0 GiB, capability 9.0\n" in text
    assert (
        "  cuda:0  fp32 50 TFLOP/s (75% of its peak), bf16 700 TFLOP/s (71% of its peak), "
        "fp16 700 TFLOP/s (71% of its peak)\n" in text
    )
    assert "  cpu     fp32 60 GFLOP/s, bf16 0.2 GFLOP/s, fp16 0.3 GFLOP/s\n" in text
    assert "extras that are missing\n  none  all are here\n" in text


def test_this_machine() -> None:
    report = doctor()
    assert report.facts.devices[-1].name == "cpu"
    assert report.facts.kernels["eager"] is None
    assert report.facts.kernels["sdpa"] is None
    assert report.facts.devices[-1].speeds["fp32"]
    assert report.facts.versions["torch"]
    assert set(report.choices) == {"device", "precision", "attention", "compile"}
    printed = CliRunner().invoke(app, ["doctor", "--json"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout)["facts"]["python"] == report.facts.python


def test_the_lists_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=!~ ;\[]", r)[0] for r in requirements} - {"anyformer"}

    assert set(CORE) == names(project["dependencies"])
    assert {extra: set(packages) for extra, packages in EXTRAS.items()} == {
        extra: names(requirements) for extra, requirements in project["optional-dependencies"].items()
    }
