"""Memory layout that kernels expect of their inputs."""

from torch import Tensor


def with_unit_stride(x: Tensor) -> Tensor:
    """Return x with the elements of each vector next to each other in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()
