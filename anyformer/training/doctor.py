"""Report of this machine: facts, and the choices that anyformer makes from them.

Three parts: facts (plain data), probing (which touches devices) and rendering. Device, precision and compilation are
chosen by the functions that training calls (`training/machine.py`). Speeds are measured, because a precision that is
supported need not be fast.
"""

import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from anyformer.kernels.hardware import measure_flops, stated_flops, usable_cores
from anyformer.nn.transforms.substitute import explain as explain_modules
from anyformer.training.machine import ReasonedChoice, choose_execution, find_compiler

CORE = ("torch", "numpy", "safetensors", "tokenizers", "pydantic", "typer", "rich", "tomli-w")
# those of users: `docs` and `dev` are for work on anyformer itself
EXTRAS: dict[str, tuple[str, ...]] = {
    "hf": ("huggingface_hub", "jinja2", "transformers"),
    "eval": ("sacrebleu",),
    "harness": ("lm-eval",),
    "plot": ("matplotlib",),
    "lab": ("scipy",),
    "vision": ("pillow",),
    "env": ("gymnasium", "minigrid"),
    "parquet": ("pyarrow",),
    "ray": ("ray",),
    "constrain": ("llguidance",),
    "serve": ("fastapi", "jinja2", "uvicorn"),
    "log": ("tensorboard",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "gguf": ("gguf", "jinja2"),
    "sentencepiece": ("protobuf", "sentencepiece"),
}

# -- facts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    system: str
    cpu: str
    cores: int  # usable by this process
    threads: int  # used by torch
    memory: int | None  # bytes


@dataclass(frozen=True)
class Device:
    name: str  # torch's: "cpu", "cuda:0", "mps"
    label: str
    memory: int | None  # bytes
    capability: str | None  # of a CUDA device
    speeds: Mapping[str, float | None]  # of a matmul, by precision, in GFLOP/s; None: it does not run


@dataclass(frozen=True)
class MachineFacts:
    machine: Machine
    python: str
    versions: Mapping[str, str | None]  # of the core packages; None: missing
    devices: tuple[Device, ...]  # the CPU last
    kernels: Mapping[str, str | None]  # attention backends on the first device: None if they work, else why not
    compiler: str | None  # path of a C or C++ compiler
    triton: str | None  # version
    missing: Mapping[str, tuple[str, ...]]  # packages, by the extra that installs them


@dataclass(frozen=True)
class DoctorReport:
    facts: MachineFacts
    choices: Mapping[str, ReasonedChoice]
    attention: Mapping[str, ReasonedChoice] = field(default_factory=dict)  # kernels of a GPT-2-sized layer, by use
    modules: Mapping[str, str] = field(default_factory=dict)  # the faster classes of plain modules, or why not

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> str:
        return "\n".join(_lines(self))


# -- choices --------------------------------------------------------------------------------------------------------


def choose_attention(kernels: Mapping[str, str | None]) -> ReasonedChoice:
    fused = [name.removeprefix("sdpa: ") for name, fault in kernels.items() if name.startswith("sdpa: ") and not fault]
    if kernels.get("sdpa", "missing"):
        return ReasonedChoice("eager", f"sdpa fails: {kernels.get('sdpa', 'missing')}")
    return ReasonedChoice(
        "sdpa", f"fused kernels: {', '.join(fused)}" if fused else "one fused kernel, equal to eager here"
    )


def choose(facts: MachineFacts) -> dict[str, ReasonedChoice]:
    """Return the choices on this machine for a recipe that leaves them to anyformer, with batches of one shape."""
    chosen = choose_execution()
    return {
        "device": chosen.device,
        "precision": chosen.precision,
        "attention": choose_attention(facts.kernels),
        "compile": chosen.compile,
    }


# -- probing --------------------------------------------------------------------------------------------------------


def doctor() -> DoctorReport:
    """Return the report of this machine; it takes about a second."""
    facts = probe()
    choices = choose(facts)
    device, precision = choices["device"].value, choices["precision"].value
    trains = precision != "fp32" and choices["compile"].value == "on"
    modules = explain_modules(device.partition(":")[0], "training" if trains else None)
    return DoctorReport(facts, choices, attention_kernels(device, precision), modules)


def attention_kernels(device: str, precision: str) -> dict[str, ReasonedChoice]:
    """Return the kernel of a GPT-2-sized attention layer in training, prefill and decoding, and the reason."""
    from anyformer.attention.explain import explain
    from anyformer.config import Attention, plain_pattern
    from anyformer.kernels.runtime import Runtime

    spec, dtype = Attention(heads=12), {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    uses = {"training": (8, 1024, 0), "prefill": (1, 512, 1024), "decoding": (1, 1, 1024)}  # batch, new tokens, cache
    past, name = plain_pattern(ahead=False), device.partition(":")[0]
    return {
        use: ReasonedChoice(*explain(spec, 768, past, Runtime(name, dtype, use == "training"), *sizes)[:2])
        for use, sizes in uses.items()
    }


def probe() -> MachineFacts:
    devices = _devices()
    return MachineFacts(
        machine=_machine(),
        python=platform.python_version(),
        versions={name: _version(name) for name in CORE},
        devices=devices,
        kernels=_kernels(devices[0].name),
        compiler=find_compiler(),
        triton=_version("triton"),
        missing=_missing(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _missing() -> dict[str, tuple[str, ...]]:
    lacking = {extra: tuple(p for p in packages if not _version(p)) for extra, packages in EXTRAS.items()}
    return {extra: packages for extra, packages in lacking.items() if packages}


def _machine() -> Machine:
    try:
        memory: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Linux
        memory = None
    return Machine(f"{platform.system()} {platform.release()}", _cpu(), usable_cores(), torch.get_num_threads(), memory)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _devices() -> tuple[Device, ...]:
    devices: list[Device] = []
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        for i in range(torch.accelerator.device_count()):
            device = torch.device(kind.type, i)
            label, memory, capability = kind.type, None, None
            if kind.type == "cuda":
                gpu = torch.cuda.get_device_properties(i)
                label, memory, capability = gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"
            devices.append(Device(str(device), label, memory, capability, _speeds(device)))
    return (*devices, Device("cpu", _cpu(), None, None, _speeds(torch.device("cpu"))))


def _speeds(device: torch.device) -> dict[str, float | None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # enough to compare precisions, and not disturbed by other busy cores
    try:
        flops = {name: measure_flops(device, name) for name in ("fp32", "bf16", "fp16")}
    finally:
        torch.set_num_threads(threads)
    return {name: speed and speed / 1e9 for name, speed in flops.items()}


def _kernels(device: str) -> dict[str, str | None]:
    """Return the attention backends: None for one that matches `eager`, the reference, else why it cannot be used.

    On CUDA the fused kernels of sdpa are listed, too.
    """
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from anyformer.attention.attend import attend
    from anyformer.attention.lowered import Dense
    from anyformer.attention.scores import Scoring

    q, k, v = torch.linspace(-1, 1, 3 * 4 * 16 * 64, device=device).view(3, 1, 4, 16, 64)
    expected = attend(q, k, v, Dense(causal=True, kernel="eager"), Scoring(0.125))
    found: dict[str, str | None] = {"eager": None}
    try:
        given = attend(q, k, v, Dense(causal=True), Scoring(0.125))
        found["sdpa"] = None if torch.allclose(given, expected, atol=1e-4) else "its result differs from eager's"
    except RuntimeError as error:
        found["sdpa"] = str(error).partition("\n")[0]
    if not device.startswith("cuda"):
        return found
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()  # the fused kernels take no fp32
    names = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    for name, kernel in names.items():
        try:
            with sdpa_kernel(kernel), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns why, and then raises
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
            found[f"sdpa: {name}"] = None
        except RuntimeError as error:
            found[f"sdpa: {name}"] = str(error).partition("\n")[0]
    return found


# -- rendering ------------------------------------------------------------------------------------------------------


def _lines(report: DoctorReport) -> list[str]:
    facts, machine = report.facts, report.facts.machine
    sections: dict[str, dict[str, str]] = {
        "machine": {
            "system": machine.system,
            "cpu": f"{machine.cpu}, {machine.cores} cores, torch uses {machine.threads} threads",
            "memory": _gib(machine.memory),
        },
        "packages": {
            "python": facts.python,
            **{name: version or "missing" for name, version in facts.versions.items()},
        },
        "devices": {device.name: _about(device) for device in facts.devices},
        "matmul speed (on a CPU: one thread)": {device.name: _speed_of(device) for device in facts.devices},
        f"attention on {facts.devices[0].name}": {name: fault or "works" for name, fault in facts.kernels.items()},
        "torch.compile": {"compiler": facts.compiler or "none found", "triton": facts.triton or "not installed"},
        "missing extras": {
            extra: f"pip install 'anyformer[{extra}]'  ({', '.join(packages)})"
            for extra, packages in facts.missing.items()
        }
        or {"none": "all are installed"},
        "attention kernels of a layer as in GPT-2": {
            name: f"{c.value}  ({c.reason})" for name, c in report.attention.items()
        },
        "faster modules": dict(report.modules),
        "anyformer would choose": {name: f"{c.value}  ({c.reason})" for name, c in report.choices.items()},
    }
    lines: list[str] = []
    for title, rows in sections.items():
        if not rows:
            continue
        width = max(map(len, rows))
        lines += ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())]
    return lines[1:]


def _about(device: Device) -> str:
    memory = f", {_gib(device.memory)}" if device.memory else ""
    return device.label + memory + (f", capability {device.capability}" if device.capability else "")


def _speed_of(device: Device) -> str:
    return ", ".join(f"{name} {_flops(speed)}{_share(device, name)}" for name, speed in device.speeds.items())


def _share(device: Device, precision: str) -> str:
    speed, peak = device.speeds[precision], stated_flops(device.label, precision)
    return f" ({1e9 * speed / peak:.0%} of its peak)" if speed and peak else ""


def _flops(speed: float | None) -> str:
    if speed is None:
        return "does not run"
    return f"{speed / 1000:.3g} TFLOP/s" if speed >= 1000 else f"{speed:.3g} GFLOP/s"


def _gib(size: int | None) -> str:
    return f"{size / 2**30:.1f} GiB" if size else "unknown"
