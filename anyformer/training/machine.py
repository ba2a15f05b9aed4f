"""Device, precision, compilation and threads of a training run, and the peak speed there.

Training follows the functions that choose, and `anyformer doctor` prints what they return, each with its reason.

Threads: a small step is launch-bound. A second thread gains little on an idle machine, and beside another busy process
the threads wait for each other. On two cores (Neoverse-N1) a step of the recipe `sort`, 0.4 GFLOP, takes 28 ms with one
thread and 29 with two; beside a busy process 33 and 91. The rule depends on the model and its batch alone, never on a
measurement: the bits of a run depend on its threads.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Batch
from anyformer.kernels.hardware import busy_advice, default_device, peak_flops
from anyformer.kernels.private import choice_options, fused_cast_choices, long_row_choices, whole_pass_options
from anyformer.nn.inspection.count import count
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


# -- options of torch.compile ------------------------------------------------------------------------------------------


SHORT_NORM_ROWS = range(257, 513)  # widths at which two passes over a norm's gradients beat one
MAX_PREFETCHED_ROW = 1024  # width: three rows of each operand then take at most 31 KB of shared memory


def compile_options(config: ModelConfig, fp8: bool) -> dict[str, Any]:
    """Return the options for a model; `fp8`: its blocks multiply in fp8.

    A norm's gradients are reduced along rows and along columns. In one pass over both, torch gives short rows too few
    threads: 198 us on 32,768 rows of 512, where two passes take 111 us (H200, torch 2.11). Other rows are prefetched
    in that pass, as torch 2.13 does by default. With fp8, torch 2.11 loses a buffer in it. A cast to fp8 first finds
    the maximum of a row, so that rows of a feed-forward would be read, and their activation computed, twice.
    """
    always, apart = whole_pass_options(), {"triton.mix_order_reduction": False}
    if fp8:
        return always | apart | choice_options(long_row_choices)
    if config.width in SHORT_NORM_ROWS:
        return always | apart
    prefetched = {"triton.mix_order_reduction_allow_multi_stages": True} if config.width <= MAX_PREFETCHED_ROW else {}
    return always | prefetched | choice_options(fused_cast_choices)


# -- threads -----------------------------------------------------------------------------------------------------------


ONE_THREAD_FLOPS = 1e9  # of a step; smaller ones gain at most 15 % from a second thread on an idle machine
SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the user's own choice


def choose_threads(flops: float) -> int:
    """Return the number of threads for a step by its FLOPs: 1 if there are few, else torch's default."""
    own = torch.get_num_threads()
    return 1 if flops < ONE_THREAD_FLOPS and may_choose_threads() else own


def may_choose_threads() -> bool:
    """Return whether torch would use several threads, and the user has not set their number."""
    return torch.get_num_threads() > 1 and not any(os.environ.get(name) for name in SETTINGS)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run operations on the CPU with a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- peak speed --------------------------------------------------------------------------------------------------------


def flops_per_token(config: ModelConfig, batch: Batch) -> float:
    """Return the FLOPs of a training step per token, for rows as long as a batch's: 3 × those of a forward pass."""
    length, source_length = batch.ids.shape[1], None if batch.source is None else batch.source.shape[1]
    return 3 * count(config, length, source_length=source_length).flops / (length + (source_length or 0))


def peak_tokens_per_second(config: ModelConfig, batch: Batch, device: torch.device, precision: str) -> float | None:
    """Return the tokens per second at which the MFU would be 1; None if the peak of the GPU is unknown.

    With fp8 it is the peak of bf16, in which some matmuls remain.
    """
    precision = "bf16" if precision == "fp8" else precision
    peak = peak_flops(torch.cuda.get_device_name(device), str(device), precision)
    return None if peak is None else peak / flops_per_token(config, batch)
