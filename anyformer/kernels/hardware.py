"""Hardware facts: the default device, usable cores and memory, and the peak FLOP/s of a device.

Importing it imports no torch.
"""

import contextlib
import os
import statistics
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from anyformer.kernels.gpu_table import find_gpu

if TYPE_CHECKING:
    import torch

# Parts of the messages of torch's CPU allocator and of the C++ library, in a plain RuntimeError.
OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate", "DefaultCPUAllocator: not enough memory", "std::bad_alloc")

BUSY_LOAD = 1.5  # load average per core; a training of ours alone, a minute ago, makes 1


def default_device() -> str:
    """Return the device on which models are trained and loaded: "cuda" where a CUDA GPU is usable, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def busy_advice(threads: int) -> str | None:
    """Return a line if other work keeps the cores busy, so that several threads wait for each other."""
    try:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1  # both of the whole machine
    except (AttributeError, OSError):  # not on Windows
        return None
    if threads < 2 or load < BUSY_LOAD * cores:
        return None
    text = f"this machine is busy (load {load:.1f} on {cores} cores)"
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return f"{text}: training takes longer than on an idle one"
    return f"{text}: start Python with OMP_WAIT_POLICY=passive, so that threads do not spin while they wait"


def usable_memory() -> int | None:
    """Return the bytes of memory that this process may use: the machine's, or less in a container; None if unknown."""
    limits = list[int]()
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not on Windows
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int(Path(name).read_text()))
    return min((n for n in limits if n > 0), default=None)


def stated_flops(label: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device by its data sheet; None if it is not in the table."""
    gpu = find_gpu(label)
    return None if gpu is None else gpu.flops.get(precision)


@cache
def peak_flops(label: str, device: str, precision: str) -> float | None:
    """Return the FLOP/s of a device by its data sheet, else as measured; None if it does not support the precision."""
    import torch

    return stated_flops(label, precision) or measure_flops(torch.device(device), precision)


def measure_flops(device: "torch.device", precision: str) -> float | None:
    """Measure the FLOP/s of a square matmul; None if it does not run.

    The size grows until a matmul takes 2 ms, so that emulated, slow precisions are measured at a small one.
    """
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def seconds(n: int) -> float:
        a = torch.ones(n, n, device=device, dtype=dtype)
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        return time.perf_counter() - start

    n, largest = 64, 512 if device.type == "cpu" else 8192
    try:
        seconds(n)  # the first call also loads libraries
        while n < largest and min(seconds(n), seconds(n)) < 0.002:
            n *= 2
        return 2 * n**3 / statistics.median(seconds(n) for _ in range(5))
    except (RuntimeError, TypeError):  # MPS raises a TypeError for what it lacks
        return None


def _synchronize(device: "torch.device") -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for the errors of a device, or a machine, without enough memory. Imports no torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY)
