"""Where a layer runs, which decides what can run there."""

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None  # a torch without CUDA comes without it


def in_compiled_half_step(x: Tensor) -> bool:
    """Whether x is read in a compiled step of half precision, with gradients of the usual kind: what has its own way
    there has a backward pass, and no derivatives of torch.func."""
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled()
    usual = compiled and not torch._C._are_functorch_transforms_active()
    return usual and Runtime.of(x, training=True).dtype in HALF


class Runtime(NamedTuple):
    """Where a layer runs."""

    device: str
    dtype: torch.dtype
    training: bool

    @classmethod
    def of(cls, x: Tensor, training: bool) -> "Runtime":
        """Where a layer that reads x runs; under autocast in its precision, whatever x has."""
        kind = x.device.type
        auto = kind != "meta" and torch.is_autocast_enabled(kind)  # meta has none
        return cls(kind, torch.get_autocast_dtype(kind) if auto else x.dtype, training)


def at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel there can begin before the last one ends (from Hopper on)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
