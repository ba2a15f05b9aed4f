"""The mesh of processes: where each one is along the axes data, context and tensor.

    world size = data · context · tensor

Processes that differ along `data` read different examples of a batch. Along `context` they read different tokens of
the same examples, and along `tensor` the same tokens with different parts of the weights. Neighbouring ranks differ
along `tensor`, whose processes exchange the most.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anyformer.config import ConfigError, Fault
from anyformer.recipe import Processes

AXES = ("data", "context", "tensor")
WEIGHT_AXES = ("copies", "shards", "tensor")


class MeshAxis(NamedTuple):
    """This process along one axis of the mesh, and the group of processes that differ along this axis only."""

    rank: int = 0
    size: int = 1
    group: Any = None  # None: all processes of the run


@dataclass(frozen=True)
class ProcessMesh:
    """This process along each axis, and the meshes for collective operations."""

    data: MeshAxis
    context: MeshAxis
    tensor: MeshAxis
    shares: MeshAxis  # data and context together: each process adds its share to the loss and to the gradients
    axes: DeviceMesh  # (data, context, tensor)
    weights: DeviceMesh  # (copies, shards, tensor): numbers of copies of a weight, and of the shards of each


def build_mesh(spec: Processes, rank: int, size: int, device_type: str) -> ProcessMesh | None:
    """Arrange all processes of a run; None if they differ along `data` only. All processes call it.

    Raises:
        ConfigError: if the number of processes is not a multiple of context · tensor.
    """
    if spec.context == spec.tensor == 1:
        return None
    block = spec.context * spec.tensor
    if size % block:
        raise ConfigError(_size_fault(spec, size))
    shares = size // spec.tensor
    axes = init_device_mesh(device_type, (size // block, spec.context, spec.tensor), mesh_dim_names=AXES)
    whole = {"full": (1, shares), "none": (shares, 1)}[spec.shard]
    weights = init_device_mesh(device_type, (*whole, spec.tensor), mesh_dim_names=WEIGHT_AXES)
    data, context, tensor = (_axis(axes, name) for name in AXES)
    share = _axis(weights, {"full": "shards", "none": "copies"}[spec.shard])
    return ProcessMesh(data, context, tensor, share, axes, weights)


def _axis(mesh: DeviceMesh, name: str) -> MeshAxis:
    one = mesh[name]
    return MeshAxis(one.get_local_rank(), one.size(), one.get_group())


def _size_fault(spec: Processes, size: int) -> list[Fault]:
    sizes = {"context": spec.context, "tensor": spec.tensor}
    split = {name: n for name, n in sizes.items() if n > 1}
    block = spec.context * spec.tensor
    count = "there is 1 process" if size == 1 else f"there are {size} processes"
    what = f"{count}, and it takes {block} or a multiple: start with torchrun --nproc-per-node {block}"
    if len(split) > 1:
        what = f"with context = {spec.context} and tensor = {spec.tensor} {what}"
    return [Fault(f"parallel.{name}", f"= {n}: {what}") for name, n in list(split.items())[:1]]
