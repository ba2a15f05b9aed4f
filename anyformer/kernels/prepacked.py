"""Weights in the memory layout of the CPU kernels, kept while a model decodes.

oneDNN on Arm reorders a weight matrix for every matmul with more than one row. For two rows that takes longer than the
matmul itself, for 64 rows a sixth of the time. With MKL on x86, 4 to 16 rows take 0.3 to 0.65 of the time if weights
were reordered before, for the same number of rows. Decode steps use the same matrices every time.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import local

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.kernels.private import (
    has_mkl_linear,
    has_reordered_linear,
    mkl_linear,
    reorder_mkl_weight,
    reorder_weight,
    reordered_linear,
)

MIN_WEIGHTS = 1 << 18  # for smaller matrices the call from Python takes longer
MAX_COPY_BYTES = 1 << 31  # of all copies; further weights are not prepacked
MIN_MKL_ROWS = 4  # fewer take as long with the weights as they are
MIN_MKL_STEPS = 16  # that regain the time of copying (Transformer-base, 16 rows, not compiled)


class PrepackedWeights:
    """Copies of weights in the memory layout of the kernels."""

    def __init__(self) -> None:
        # (address, rows, or 0 if a copy serves any number) → (version of the weight, copy)
        self._copies: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self._left = MAX_COPY_BYTES

    def find(self, weight: Tensor, rows: int) -> Tensor | None:
        """Return the copy of a matrix, made at its first matmul and when it has changed, or None for want of memory."""
        key = weight.data_ptr(), 0 if _uses_arm_library() else rows
        version = 0 if weight.is_inference() else weight._version
        old, copy = self._copies.get(key, (None, None))
        if copy is None and weight.nbytes > self._left:
            return None
        if copy is None or old != version:
            self._left -= weight.nbytes if copy is None else 0
            own = weight.detach()
            copy = reorder_weight(own) if _uses_arm_library() else reorder_mkl_weight(own, rows)
            self._copies[key] = version, copy
        return copy


class _Here(local):
    packed: PrepackedWeights | None = None
    meant = False  # whether there is one: torch 2.11 fails to compile that question itself, and takes this for a no


_here = _Here()


def use_prepacked(packed: PrepackedWeights, rows: int, steps: int = 1) -> AbstractContextManager[None]:
    """Use these copies for matmuls with several rows within the block, if prepacking pays on this CPU.

    `steps`: expected number of these blocks with the same number of rows.
    """
    return _in_use(packed) if prepacking_pays(rows, steps) else nullcontext()


@contextmanager
def _in_use(packed: PrepackedWeights) -> Iterator[None]:
    _here.packed, _here.meant = packed, True
    try:
        yield
    finally:
        _here.packed, _here.meant = None, False


@cache
def prepacking_pays(rows: int, steps: int) -> bool:
    """Return whether prepacked weights are faster for this number of rows and steps."""
    if _uses_arm_library():
        return rows > 1
    return rows >= MIN_MKL_ROWS and steps >= MIN_MKL_STEPS and _uses_mkl()


@cache
def _uses_arm_library() -> bool:
    return has_reordered_linear()


@cache
def _uses_mkl() -> bool:
    return has_mkl_linear()


def can_use_prepacked(x: Tensor, weight: Tensor) -> bool:
    """Return whether prepacked weights support a call: fp32 on a CPU, no gradients, weight a parameter."""
    return (
        _here.meant
        and isinstance(weight, nn.Parameter)
        and x.device.type == "cpu"
        and x.dtype is weight.dtype is torch.float32
        and weight.numel() >= MIN_WEIGHTS
        and weight.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    copy = None if _here.packed is None else _here.packed.find(weight, x.shape[:-1].numel())
    if copy is None:
        return F.linear(x, weight, bias)
    return reordered_linear(x, copy, bias) if _uses_arm_library() else mkl_linear(x, copy, weight, bias)


def _like(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


# not `custom_op`, which adds 60 microseconds to every call
_library = torch.library.Library("anyformer", "FRAGMENT")
_library.define("prepacked_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("prepacked_linear", _multiply, "CPU")
_library.impl("prepacked_linear", _like, "Meta")
prepacked_linear = torch.ops.anyformer.prepacked_linear.default
"""`F.linear` with a prepacked weight."""
