"""Linear layers of 8- and 4-bit weights on CPUs with dot products, by a kernel in C: `dot_product.c`.

These are Arm CPUs with asimddp and x86 CPUs with AVX-512 VNNI. None of torch's kernels for Arm multiplies more than a
few rows by 8-bit weights faster than by fp32 ones. 4 bits have a kernel here for x86 alone: torch has one for Arm. The
C compiler that torch.compile needs builds the library once for each kind of CPU, into the user's cache folder.
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

from anyformer.kernels.conventions import user_cache

SOURCE = Path(__file__).with_name("dot_product.c")
X86 = platform.machine() == "x86_64"
FEATURE = "avx512_vnni" if X86 else "asimddp"  # as Linux names it
MACHINE_FLAGS = ("-mavx512f", "-mavx512vnni") if X86 else ("-march=armv8.2-a+dotprod",)
FLAGS = ("-O3", *MACHINE_FLAGS, "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
BLOCK = 16 if X86 else 8  # rows of a block of weights
STEP = 16  # values of a row that the kernel reads at once


@cache
def is_available(bits: int = 8) -> bool:
    """Return whether there is a kernel for such weights, this CPU has dot products, and a compiler built it."""
    return (bits == 8 or X86) and FEATURE in _features() and _library() is not None


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
    folder = user_cache("kernels")
    library = folder / f"dot_product-{key}.so"
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
    linear.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 4 + [ctypes.c_int] * 2
    linear.restype = None
    return linear


def pack(q: Tensor, bits: int = 8) -> Tensor:
    """Return weights [n, k] in the layout of the kernel, [n / BLOCK, k / 4, BLOCK, 4], filled up with zeros.

    On x86 the bytes are q + 128: the instruction multiplies unsigned by signed integers. Of q + 8, with 4 bits, two
    share a byte, four values of a row and its next four: [n / BLOCK, k / 8, BLOCK, 4].
    """
    n, k = q.shape
    more = (0, -k % STEP, 0, -n % BLOCK)
    full = F.pad(q + 8, more, value=8) if bits == 4 else F.pad(q, more) ^ (-128 if X86 else 0)
    blocks = full.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, 4)).transpose(1, 2)
    if bits == 4:
        low, high = blocks.unflatten(1, (-1, 2)).unbind(2)
        blocks = low | (high << 4)
    return blocks.contiguous()


def pack_scale(scale: Tensor) -> Tensor:
    """Return bf16 scales of groups [n, groups] in the layout of the kernel, [n / BLOCK, groups, BLOCK]."""
    full = F.pad(scale, (0, 0, 0, -len(scale) % BLOCK))
    return full.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def reference(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias for x [m, k], with its rows rounded to 8 bits, and W = q · scale, [n, groups, k / groups]."""
    x_scale = x.abs().amax(dim=-1, keepdim=True) / 127
    rounded = (x / x_scale.where(x_scale > 0, 1.0)).round()
    groups = torch.einsum("mgk,ngk->mng", rounded.unflatten(1, q.shape[1:]).double(), q.double()).float()
    y = groups[..., 0] * (x_scale * scale[:, 0]) if q.shape[1] == 1 else (groups * scale.float()).sum(-1) * x_scale
    return y if bias is None else y + bias


def _multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply by 8-bit weights with scale [n], or by 4-bit weights with bf16 scale [n / BLOCK, groups, BLOCK]."""
    linear, (m, width) = _library(), x.shape
    bits, groups = (8, 1) if scale.ndim == 1 else (4, scale.shape[1])
    n, k = weight.shape[0] * BLOCK, weight.shape[1] * 32 // bits
    assert linear is not None
    x = x.contiguous() if width == k else F.pad(x, (0, k - width))
    y, rounded = x.new_empty(m, n), x.new_empty(m, 1 + groups + k // 4)  # a scale, the offsets of groups, the integers
    at = 0 if bias is None else bias.data_ptr()
    tensors = x.data_ptr(), weight.data_ptr(), scale.data_ptr(), at, y.data_ptr(), rounded.data_ptr()
    linear(*tensors, m, n, k, groups, bits, torch.get_num_threads())
    return y


def _like(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), weight.shape[0] * weight.shape[2])


# as in `prepacked.py`: `custom_op` adds 60 microseconds to every call
_ops = torch.library.Library("anyformer", "FRAGMENT")
_ops.define("dot_product_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
_ops.impl("dot_product_linear", _multiply, "CPU")
_ops.impl("dot_product_linear", _like, "Meta")
dot_product_linear = torch.ops.anyformer.dot_product_linear.default
"""The result of `reference` for fp32 x and weights of `pack`; scale [n] with 8 bits, of `pack_scale` with 4."""
