"""Linear layers of int8 weights on CPUs with dot products, by a kernel in C: `int8_dot.c`.

These are Arm CPUs with asimddp and x86 CPUs with AVX-512 VNNI. None of torch's kernels for Arm multiplies more than a
few rows by int8 weights faster than by fp32 ones. The C compiler that torch.compile needs builds the library once for
each kind of CPU, into the user's cache folder.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SOURCE = Path(__file__).with_name("int8_dot.c")
X86 = platform.machine() == "x86_64"
FEATURE = "avx512_vnni" if X86 else "asimddp"  # as Linux names it
MACHINE_FLAGS = ("-mavx512f", "-mavx512vnni") if X86 else ("-march=armv8.2-a+dotprod",)
FLAGS = ("-O3", *MACHINE_FLAGS, "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
BLOCK = 16 if X86 else 8  # rows of a block of weights
STEP = 16  # values of a row that the kernel reads at once


@cache
def is_available() -> bool:
    """Whether this CPU has dot products, and a compiler built the kernel."""
    return FEATURE in _features() and _library() is not None


@cache
def _features() -> frozenset[str]:
    """Return the instruction sets that Linux lists for all cores; none on other systems."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    cores = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))]
    return frozenset.intersection(*cores) if cores else frozenset()


@cache
def _library() -> Any | None:
    """Return the function of the library, which is built if it is not in the cache folder; None without a compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))  # it may have options
    if not compiler or shutil.which(compiler[0]) is None:
        return None
    # a cache folder may be shared by CPUs of several kinds, and the options of CC may be those of one (-march=native)
    kind = " ".join((*compiler, *FLAGS, *sorted(_features())))
    key = hashlib.sha256(SOURCE.read_bytes() + kind.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "anyformer", "kernels")
    library = folder / f"int8_dot-{key}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as own:  # of this process: others may build at the same time
                built = Path(own) / "built.so"
                subprocess.run([*compiler, *FLAGS, str(SOURCE), "-o", str(built)], check=True, capture_output=True)
                built.replace(library)
        linear = ctypes.CDLL(str(library)).linear
    except (OSError, subprocess.CalledProcessError):
        return None
    linear.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    linear.restype = None
    return linear


def pack(q: Tensor) -> Tensor:
    """Return weights [n, k] in the layout of the kernel, [n / BLOCK, k / 4, BLOCK, 4], filled up with zeros.

    On x86 the bytes are q + 128: the instruction multiplies unsigned by signed integers.
    """
    n, k = q.shape
    full = F.pad(q, (0, -k % STEP, 0, -n % BLOCK)) ^ (-128 if X86 else 0)
    return full.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, 4)).transpose(1, 2).contiguous()


def reference(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x qᵀ · scale + bias for x [m, k], with its rows rounded to 8 bits, and int8 q [n, k] with scale [n]."""
    x_scale = x.abs().amax(dim=-1, keepdim=True) / 127
    rounded = (x / x_scale.where(x_scale > 0, 1.0)).round()
    y = (rounded.double() @ q.double().T).float() * (x_scale * scale)
    return y if bias is None else y + bias


def _multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    linear, (m, width), (n,), k = _library(), x.shape, scale.shape, weight.shape[1] * 4
    assert linear is not None
    x = x.contiguous() if width == k else F.pad(x, (0, k - width))
    y, rounded = x.new_empty(m, n), x.new_empty(m, 2 + k // 4)  # 8 bytes of a row, and its integers
    at = 0 if bias is None else bias.data_ptr()
    tensors = x.data_ptr(), weight.data_ptr(), scale.data_ptr(), at, y.data_ptr(), rounded.data_ptr()
    linear(*tensors, m, n, k, torch.get_num_threads())
    return y


def _like(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(scale))


# as in `prepacked.py`: `custom_op` adds 60 microseconds to every call
_ops = torch.library.Library("anyformer", "FRAGMENT")
_ops.define("int8_dot_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
_ops.impl("int8_dot_linear", _multiply, "CPU")
_ops.impl("int8_dot_linear", _like, "Meta")
int8_dot_linear = torch.ops.anyformer.int8_dot_linear.default
"""The result of `reference` for fp32 x and weights of `pack`, with one scale (and bias) per row of these."""
