"""Exchanges within a group of tensor parallelism, and their gradients.

Between split layers all processes of a group hold the same activations. `enter` and `leave` are the borders of a region
in which each process computes with its own part of the weights:

              forward          backward
    enter     x                sum of the gradients
    leave     sum of x         the gradient
    gather    all parts of x   own part of the gradient

Parameters are DTensors; `local` is the part of this process. All of them are differentiable.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x, which all processes hold; the gradients of their parts are summed."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def leave(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of x over the group."""
    parts = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the parts of all processes, one after the other in the last dimension."""
    parts = DTensor.from_local(x, mesh, [Shard(x.dim() - 1)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


@torch.no_grad()
def largest(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the elementwise maximum of x over the group, without a gradient."""
    x = x.detach().clone()
    all_reduce(x, op=ReduceOp.MAX, group=mesh.get_group())
    return x


def local(parameter: Tensor) -> Tensor:
    """Return the part of a parameter that this process holds; all of one that is not split."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def mesh_of(x: Tensor) -> DeviceMesh | None:
    """Return the mesh of a DTensor; None for a plain tensor."""
    return x.device_mesh if isinstance(x, DTensor) else None


@contextmanager
def own_generator(x: Tensor, mesh: DeviceMesh) -> Iterator[None]:
    """Let the processes of a group draw different random numbers for their parts of x.

    Outside, their generators stay equal, because dropout of activations that all hold must be the same for all.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed + mesh.get_local_rank())
        yield


def span(size: int, mesh: DeviceMesh) -> slice:
    """Return which of `size` rows, heads or features this process has."""
    part = size // mesh.size()
    start = mesh.get_local_rank() * part
    return slice(start, start + part)
