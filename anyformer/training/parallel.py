"""Training in several processes: their collective operations, and models that are sharded or replicated among them.

All processes run the same loop over the same batches, and each takes its share of the rows. They agree on everything
that decides how to continue (a loss, a signal, an error); only the first writes, prints and evaluates. So a run does
not depend on the number of processes, except for rounding and dropout masks.
"""

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from anyformer.config import ConfigError, Fault
from anyformer.data.batch import Batch
from anyformer.kernels.conventions import IGNORE, PADDING
from anyformer.nn.aux_outputs import Reduce, identity
from anyformer.nn.model import Transformer
from anyformer.recipe import Processes
from anyformer.training.ranks.collectives import mesh_of
from anyformer.training.ranks.mesh import MeshAxis, ProcessMesh, build_mesh
from anyformer.training.ranks.tensor import split_model

T = TypeVar("T")

ShardKind = Literal["none", "full"]  # `parallel.shard` of a recipe
CompilePart = Callable[[nn.Module], object]
MAX_WAIT = timedelta(days=1)  # for the first process, while it evaluates or writes
JOIN_INTERVAL = 0.01  # seconds between two looks for processes that start


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run. All processes call its methods, in the same order."""

    rank: int = 0
    size: int = 1
    group: Any = None  # on CPUs, whatever the device of the model
    mesh: ProcessMesh | None = None  # None: all processes differ along `data` only

    def arranged(self, spec: Processes) -> "Ranks":
        """Return these ranks with the mesh of a recipe. All processes call it."""
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        return replace(self, mesh=build_mesh(spec, self.rank, self.size, device_type))

    @property
    def data(self) -> MeshAxis:
        """This process among those that read different examples."""
        return MeshAxis(self.rank, self.size) if self.mesh is None else self.mesh.data

    @property
    def context(self) -> MeshAxis:
        """This process among those that read different tokens of the same examples."""
        return MeshAxis() if self.mesh is None else self.mesh.context

    @property
    def tensor(self) -> MeshAxis:
        """This process among those that read the same tokens with different parts of the weights."""
        return MeshAxis() if self.mesh is None else self.mesh.tensor

    @property
    def shares(self) -> MeshAxis:
        """This process among those whose losses and gradients add up: along data and context."""
        return MeshAxis(self.rank, self.size) if self.mesh is None else self.mesh.shares

    @property
    def is_first(self) -> bool:
        """True if this is the process that writes and prints."""
        return self.rank == 0

    @property
    def has_shards(self) -> bool:
        """True if FSDP2 gives each process a shard of the weights; else, beside a split model, a copy of them."""
        return self.mesh is None or self.mesh.weights["shards"].size() > 1

    def on_first(self, work: Callable[[], T]) -> T:
        """Call a function on the first process. Return its result, or raise its `ConfigError`, on all."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [attempt(work) if self.is_first else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    def on_each(self, work: Callable[[], T]) -> T:
        """Call a function on each process. Return its own result, or raise the first `ConfigError` of any on all."""
        if self.size == 1:
            return work()
        result, own_error = attempt(work)
        errors: list[ConfigError | None] = [None] * self.size
        dist.all_gather_object(errors, own_error, group=self.group)
        for error in errors:
            if error is not None:
                raise error
        return cast(T, result)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any process."""
        if self.size == 1:
            return flag
        count = torch.tensor(int(flag))
        dist.all_reduce(count, group=self.group)
        return bool(count)

    def sum(self, x: Tensor) -> Tensor:
        """Sum x in place over the processes along data and context."""
        if self.shares.size > 1:
            dist.all_reduce(x, group=self.shares.group)
        return x

    @property
    def reduce(self) -> Reduce:
        """The differentiable sum of a tensor over the processes along data and context."""
        return identity if self.shares.size == 1 else partial(sum_over_processes, group=self.shares.group)

    def split(self, batch: Batch) -> Batch:
        """Return this process's examples of a batch, each with all its rows.

        A process without examples reads the first one without labels, because it must join the collective calls.
        """
        rank, size, _ = self.data
        if size == 1:
            return batch
        count = len(batch.labels)
        idle = rank >= count
        own = slice(0, 1) if idle else slice(rank, None, size)

        def rows(x: Tensor) -> Tensor:
            return x.unflatten(0, (count, -1))[own].flatten(0, 1)

        cut: dict[str, Any] = {name: rows(x) for name, x in batch._asdict().items() if isinstance(x, Tensor)}
        if batch.media is not None:  # places are cut by rows; every process embeds all segments
            at = {name: rows(x) for name, x in batch.media._asdict().items() if name.endswith("_at") and x is not None}
            cut["media"] = batch.media._replace(**at)
        mine = batch._replace(**cut)
        if not idle:
            return mine
        source = None if mine.source is None else torch.full_like(mine.source, PADDING)
        return mine._replace(
            labels=torch.full_like(mine.labels, IGNORE),
            segments=torch.full_like(mine.ids, PADDING),  # counted in no statistic
            source_segments=source,
        )

    def seed(self, seed: int, step: int) -> None:
        """Seed torch's generator by step and rank: dropout masks differ between processes, and resuming needs no state.

        Processes that read the same tokens (along `tensor`) have the same seed. A single process keeps its generator,
        whose state is in the checkpoint.
        """
        if self.size > 1:
            mixed = np.random.SeedSequence([seed, step, self.shares.rank]).generate_state(1, np.uint64)
            torch.manual_seed(int(mixed[0]))


SINGLE = Ranks()


def attempt(work: Callable[[], T]) -> tuple[T | None, ConfigError | None]:
    """Return the result of a function, or its `ConfigError`."""
    try:
        return work(), None
    except ConfigError as error:
        return None, error


class LostProcess(RuntimeError):
    """A collective operation failed because another process has ended."""


@contextmanager
def join(agreed: tuple[type[Exception], ...]) -> Iterator[Ranks]:
    """Initialise the process group under torchrun and yield the ranks; `SINGLE` for one process.

    The caller raises errors of the types `agreed` in all processes. Only after these is the group destroyed: after
    another error, that would wait for the other processes.
    """
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield SINGLE
        return
    own = not dist.is_initialized()
    try:
        if own:
            _init_process_group()
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=MAX_WAIT))
        ranks.on_each(_take_device)
        yield ranks
    except BaseException as error:
        # when one process ends, torchrun terminates the rest: each shall end by itself, with its own exit code
        if own and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if own and isinstance(error, agreed):  # else it would wait for the other processes
            dist.destroy_process_group()
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error)):
            why = str(error).strip().partition("\n")[0]
            raise LostProcess(f"rank {os.environ['RANK']}: lost the connection to another process: {why}") from error
        raise
    if own:
        dist.destroy_process_group()


def _init_process_group() -> None:
    store, rank, size = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=_own_store(store, rank, size), rank=rank, world_size=size)


def _own_store(store: Any, rank: int, size: int) -> Any:
    """Return the part of a store that only the processes of this attempt use.

    torchrun keeps its store when it restarts processes, with the addresses of the ended ones, and each node counts
    restarts by itself. So each process writes a new token, and the first one answers all that it reads until every
    process has answered in turn.
    """
    token = secrets.token_hex(8)
    if rank == 0:
        absent, until = set(range(1, size)), time.monotonic() + store.timeout.total_seconds()
        while absent:
            for other in tuple(absent):
                if store.check([f"token of {other}"]):
                    store.set(f"attempt of {store.get(f'token of {other}').decode()}", token)
                if store.check([f"{other} in {token}"]):
                    absent.discard(other)
            if time.monotonic() > until:
                raise LostProcess(f"rank 0: {len(absent)} of {size} processes did not start")
            time.sleep(JOIN_INTERVAL)
    else:
        store.set(f"token of {rank}", token)
        token = store.get(f"attempt of {token}").decode()  # waits for it
        store.set(f"{rank} in {token}", "")
    return dist.PrefixStore(token, store)  # type: ignore[attr-defined]


def _take_device() -> None:
    """Select the GPU of this process, if there are GPUs."""
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if 0 < count <= number:
        raise ConfigError([Fault("--nproc-per-node", f"each process needs a GPU, and there are {count}")])
    if count:
        torch.cuda.set_device(number)


# -- sharded and replicated models -------------------------------------------------------------------------------------


def divide_model(
    model: Transformer, ranks: Ranks, shard: ShardKind, device: torch.device, compile_part: CompilePart | None
) -> None:
    """Split a model along `tensor`, then shard it along data and context, as a recipe says. None: no compilation.

    DDP cannot hold weights that are split: beside a split FSDP2 replicates the model, with one shard of each weight.
    """
    mesh = ranks.mesh
    if ranks.tensor.size > 1:
        assert mesh is not None
        split_model(model, mesh.weights["tensor"])
    if ranks.shares.size > 1 and (shard == "full" or ranks.tensor.size > 1):
        shard_model(model, _shard_mesh(ranks, shard, device), compile_part)


def _shard_mesh(ranks: Ranks, shard: ShardKind, device: torch.device) -> DeviceMesh:
    """Return the axes along which weights are sharded; with a first axis of copies if these have one shard."""
    if ranks.mesh is None:
        return init_device_mesh(device.type, (ranks.size,))
    return ranks.mesh.weights[{"full": ("shards",), "none": ("copies", "shards")}[shard]]


def shard_model(model: Transformer, mesh: DeviceMesh, compile_part: CompilePart | None) -> None:
    """Leave each process a part of every weight, and so of gradients and optimiser state (FSDP2).

    Blocks are gathered when they run, the rest for the whole pass. Precision is left to autocast: FSDP's own casts
    would also change the context beside the activations, such as rotary angles. Each gathered unit is compiled by
    itself, because gathering cannot be compiled.
    """
    for stack in (model.encoder, model.decoder):
        for block in stack.blocks if stack is not None else ():  # a block that several layers share occurs once
            # torch before 2.13 accepts no container, even one with a `forward`: its parts form one group
            parts = list(block.children()) if isinstance(block, nn.ModuleDict) else [block]
            if compile_part is not None:
                for part in parts:
                    compile_part(part)
            fully_shard(parts, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sum_over_processes(x: Tensor, group: Any = None) -> Tensor:
    """Return the differentiable sum of x over a group of processes (None: all), each with a part of the batch."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    return all_reduce(x, group=group or dist.group.WORLD) if x.requires_grad else _summed(x, group)


@torch.no_grad()
def _summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def replicate(run: Any, ranks: Ranks) -> Any:
    """Return a module of which each process has all weights: gradients are averaged during the backward pass (DDP)."""
    return run if ranks.shares.size == 1 else DistributedDataParallel(run)


def sync_gradients(run: Any, last: bool) -> AbstractContextManager[None]:
    """Return the context of a micro-batch: DDP averages gradients in the last one of a step only."""
    return run.no_sync() if isinstance(run, DistributedDataParallel) and not last else nullcontext()


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale all gradients down to a norm of at most `limit`. Return their norm before, over all processes.

    Weights on different meshes (split or whole, sharded or not) are different kinds of tensors to torch: each kind has
    a norm, and the norm of these norms is that of all gradients.
    """
    kinds: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            kinds.setdefault(mesh_of(parameter), []).append(parameter)
    gradients = [[p.grad for p in some if p.grad is not None] for some in kinds.values()]
    norms = [full_tensor(nn.utils.get_total_norm(some)) for some in gradients]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for some in kinds.values():
        nn.utils.clip_grads_with_norm_(some, limit, norm)
    return norm


def full_tensor(x: Tensor) -> Tensor:
    """Return a tensor gathered from all processes, if it is sharded."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """Return a full tensor on the device of another one, and sharded as it is."""
    x = x.to(like.device)
    return distribute_tensor(x, like.device_mesh, like.placements) if isinstance(like, DTensor) else x
