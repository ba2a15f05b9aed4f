"""Device, data type and mode of a layer, which decide the kernels that can run; functions that compile as one op."""

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from anyformer.kernels.private import functorch_is_active

HALF = (torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None  # a torch without CUDA comes without it


def in_compiled_half_step(x: Tensor) -> bool:
    """Return whether x is read in a compiled half-precision training step.

    False under torch.func: the custom ops used there have a backward pass, but no functorch rules.
    """
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled()
    usual = compiled and not functorch_is_active()
    return usual and Runtime.of(x, training=True).dtype in HALF


def runs_fused(x: Tensor) -> bool:
    """Return whether kernels replace several of torch's: on CUDA, without gradients and outside of the compiler."""
    return HAS_TRITON and x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the data type of autocast on a kind of device, or None if autocast is off; meta has none."""
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


class Runtime(NamedTuple):
    """Device, data type and mode of a layer, which decide the kernels that can run."""

    device: str
    dtype: torch.dtype
    training: bool

    @classmethod
    def of(cls, x: Tensor, training: bool) -> "Runtime":
        """Return the runtime of a layer that reads x: under autocast with its data type, else with that of x."""
        device = x.device.type
        return cls(device, autocast_dtype(device) or x.dtype, training)


def at_least_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    """Return whether a kernel can start before the previous one ends (programmatic dependent launch, since Hopper)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def with_unit_stride(x: Tensor) -> Tensor:
    """Return x with the elements of each vector next to each other in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


P = ParamSpec("P")
R = TypeVar("R")


def opaque(name: str, like: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function one op for the compiler; `like` returns empty tensors of the same shapes.

    Elsewhere the function itself is called. The first call of a custom op outside of the compiler would import the
    whole compiler, which takes seconds, and each call tens of microseconds.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        op: Any = torch.library.custom_op(f"anyformer::{name}", function, mutates_args=())
        op.register_fake(like)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            found: R = (op if torch.compiler.is_compiling() else function)(*args, **kwargs)
            return found

        return call

    return decorate
