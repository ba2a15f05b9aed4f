"""Device, precision and compilation of a training run, each with the reason for the choice.

Training follows these functions, and `anyformer doctor` prints what they return.
"""

import importlib.util
import os
import shutil
from dataclasses import dataclass

import torch
from rich.console import Console

from anyformer.config import ConfigError, Fault
from anyformer.kernels.hardware import busy_advice, default_device
from anyformer.nn.transforms.fp8 import is_supported

COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "cl")


@dataclass(frozen=True)
class ReasonedChoice:
    value: str
    reason: str


@dataclass(frozen=True)
class Execution:
    """Where and how the steps of a training run are computed."""

    device: ReasonedChoice
    precision: ReasonedChoice  # fp32, bf16, fp16 or fp8
    compile: ReasonedChoice  # on or off


def choose_execution(precision: str = "auto", compile: str = "auto", *, shapes: int = 1) -> Execution:
    """Return the execution for `train.precision` and `train.compile`; `shapes` as in `choose_compile`."""
    device = choose_device()
    where = torch.device(device.value)
    compiled = choose_compile(compile, where, shapes, compiler_fault())
    return Execution(device, choose_precision(precision, where), compiled)


def choose_device() -> ReasonedChoice:
    """Return "cuda" where torch can use a CUDA GPU, else "cpu"."""
    name = default_device()
    if name == "cuda":
        return ReasonedChoice(name, torch.cuda.get_device_name())
    return ReasonedChoice(name, "torch can use no CUDA GPU, and training uses no other accelerator")


def choose_precision(setting: str, device: torch.device) -> ReasonedChoice:
    """Return the precision of `train.precision`: for "auto", bf16 on a GPU with units for it, else fp32.

    fp16 is never automatic: its range is smaller than that of fp32, so it needs loss scaling.
    """
    if setting == "fp8" and not is_supported(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        what = (
            f"needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), and this is {name}: use 'auto'"
        )
        raise ConfigError([Fault("train.precision", f"= 'fp8': {what}")])
    if setting != "auto":
        return ReasonedChoice(setting, "train.precision")
    if device.type != "cuda":
        return ReasonedChoice("fp32", "on a CPU; set train.precision = 'bf16' if its matmuls are faster")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return ReasonedChoice("bf16", "the GPU has units for it")
    return ReasonedChoice("fp32", "the GPU has no units for bf16")


def choose_compile(setting: str, device: torch.device, shapes: int, fault: str | None) -> ReasonedChoice:
    """Return whether a step is compiled, "on" or "off", by `train.compile`.

    Args:
        setting: "on", "off" or "auto".
        device: the device of the model.
        shapes: how many different shapes the batches of an epoch have.
        fault: why torch.compile cannot run here (`compiler_fault`); None if it can.
    """
    if setting != "auto":
        return ReasonedChoice(setting, "train.compile")
    if device.type != "cuda":
        return ReasonedChoice("off", f"on {device.type} compilation takes tens of seconds and gains little")
    if shapes > 1:
        return ReasonedChoice("off", f"batches have {shapes:,} shapes, and each would be compiled")
    if fault is not None:
        return ReasonedChoice("off", fault)
    return ReasonedChoice("on", "for batches of one shape (crops, ordered, packed), but not for padded ones of many")


def advise_if_busy(device: torch.device, threads: int, console: Console) -> None:
    """Print a line if a CPU is so busy that training takes longer; the number of threads stays as it is."""
    if device.type == "cpu" and (advice := busy_advice(threads)):
        console.print(advice, highlight=False, markup=False, soft_wrap=True)


def compiler_fault() -> str | None:
    """Return why torch.compile cannot build GPU kernels on this machine, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None if find_compiler() else "no C or C++ compiler found: install g++ or clang++"


def find_compiler() -> str | None:
    """Return the path of a C or C++ compiler: that of $CXX or $CC, else one of the usual names."""
    names = (os.environ.get("CXX", ""), os.environ.get("CC", ""), *COMPILERS)
    return next(filter(None, map(shutil.which, names)), None)
