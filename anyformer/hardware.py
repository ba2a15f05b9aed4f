"""What the hardware could do: the cores that are ours, and a device's FLOPs a second, as its maker states them, else as
a matrix product shows it.

Importing it imports no torch.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Parts of the messages of torch's CPU allocator and of the C++ library, in a plain RuntimeError.
OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate", "DefaultCPUAllocator: not enough memory", "std::bad_alloc")

# Dense FLOP/s of matrix products that add up in fp32, from the makers' data sheets, by a part of the name that torch
# gives; where several fit, the first. fp32 is without TF32, which torch does not use unless told to.
PEAKS: Mapping[str, Mapping[str, float]] = {
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "fp32": 51e12},
    "H100 NVL": {"bf16": 835e12, "fp16": 835e12, "fp32": 60e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "H200 NVL": {"bf16": 835e12, "fp16": 835e12, "fp32": 60e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "GH200": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "fp32": 91.6e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "fp32": 30.3e12},
    "RTX 4090": {"bf16": 165e12, "fp16": 165e12, "fp32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "fp16": 71e12, "fp32": 35.6e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
}


def cores() -> int:
    """Of the processor, that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def memory() -> int | None:
    """Return the bytes of memory that this process may use: the machine's, or less in a container; None if unknown."""
    found = list[int]()
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not on Windows
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            found.append(int(Path(name).read_text()))
    return min((n for n in found if n > 0), default=None)


def stated(label: str, precision: str) -> float | None:
    """The maker's FLOP/s of a device by its name; None if it is not in the table, or is a part or a small kin of it."""
    words = f" {label.replace('-', ' ')} "
    if " MIG " in words or " Laptop " in words:
        return None
    found: Mapping[str, float] = next((peaks for name, peaks in PEAKS.items() if f" {name} " in words), {})
    return found.get(precision)


@cache
def peak(label: str, device: str, precision: str) -> float | None:
    """FLOP/s of a device: stated, else measured; None where it does not know the precision."""
    import torch

    return stated(label, precision) or measured(torch.device(device), precision)


def measured(device: "torch.device", precision: str) -> float | None:
    """FLOP/s of a square matrix product, grown until it takes 2 ms: a precision that is emulated stays small."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def took(n: int) -> float:
        a = torch.ones(n, n, device=device, dtype=dtype)
        _finish(device)
        start = time.perf_counter()
        a @ a
        _finish(device)
        return time.perf_counter() - start

    n, biggest = 64, 512 if device.type == "cpu" else 8192
    try:
        took(n)  # the first call also loads libraries
        while n < biggest and min(took(n), took(n)) < 0.002:
            n *= 2
        return 2 * n**3 / statistics.median(took(n) for _ in range(5))
    except (RuntimeError, TypeError):  # MPS raises a TypeError for what it lacks
        return None


def _finish(device: "torch.device") -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for the errors of a device, or a machine, without enough memory. Imports no torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY)
