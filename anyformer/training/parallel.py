"""More than one process: who is there, what they do together, and how a model is shared out among them.

All processes run the same loop over the same batches, and each takes its share of the rows. Whatever decides how to go
on (a loss, a signal, an error) is agreed by all of them; only the first writes, speaks and evaluates. So a run is the
same whatever the number of processes, but for rounding and for what dropout drops.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from anyformer.config import ConfigError, Fault
from anyformer.conventions import IGNORE, PADDING
from anyformer.data.batch import Batch
from anyformer.nn.model import Transformer

T = TypeVar("T")

LONGEST_WAIT = timedelta(days=1)  # for the first process, while it evaluates or writes


@dataclass(frozen=True)
class Ranks:
    """The processes of a run as one of them sees them. Its methods are called by all, in the same order."""

    rank: int = 0
    size: int = 1
    group: Any = None  # for agreements, on CPUs whatever is trained on

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def first(self, work: Callable[[], T]) -> T:
        """What the first process makes, for all; what is wrong with it is wrong for all."""
        if self.size == 1:
            return work()
        made: list[Any] = [_attempt(work) if self.leads else None]
        dist.broadcast_object_list(made, src=0, group=self.group)
        result, error = made[0]
        if error is not None:
            raise error
        return result

    def each(self, work: Callable[[], T]) -> T:
        """What each process makes for itself; where one cannot, none goes on, and all say the same."""
        if self.size == 1:
            return work()
        result, error = _attempt(work)
        errors: list[ConfigError | None] = [None] * self.size
        dist.all_gather_object(errors, error, group=self.group)
        for found in errors:
            if found is not None:
                raise found
        return cast(T, result)

    def any(self, flag: bool) -> bool:
        """Whether it is so for one of them."""
        if self.size == 1:
            return flag
        count = torch.tensor(int(flag))
        dist.all_reduce(count, group=self.group)
        return bool(count)

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def share(self, batch: Batch) -> Batch:
        """The examples of this process, each with all its rows. Where none is left, it reads the first and is asked
        nothing: it must come along."""
        if self.size == 1:
            return batch
        count = len(batch.labels)
        idle = self.rank >= count
        some = slice(0, 1) if idle else slice(self.rank, None, self.size)
        cut: dict[str, Any] = {
            name: x.unflatten(0, (count, -1))[some].flatten(0, 1)
            for name, x in batch._asdict().items()
            if isinstance(x, Tensor)
        }
        mine = batch._replace(**cut)
        if not idle:
            return mine
        source = None if mine.source is None else torch.full_like(mine.source, PADDING)
        return mine._replace(
            labels=torch.full_like(mine.labels, IGNORE),
            segments=torch.full_like(mine.ids, PADDING),  # seen by no statistic
            source_segments=source,
        )

    def seed(self, seed: int, step: int) -> None:
        """Each process drops its own; a function of the step, so that a resumed run needs no generator of each."""
        if self.size > 1:
            mixed = np.random.SeedSequence([seed, step, self.rank]).generate_state(1, np.uint64)
            torch.manual_seed(int(mixed[0]))


ALONE = Ranks()


def _attempt(work: Callable[[], T]) -> tuple[T | None, ConfigError | None]:
    try:
        return work(), None
    except ConfigError as error:
        return None, error


@contextmanager
def join(agreed: tuple[type[Exception], ...]) -> Iterator[Ranks]:
    """The processes that torchrun started; one that was started by itself is alone. All of them raise an `agreed` error
    together."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if own := not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=LONGEST_WAIT))
    try:
        ranks.each(_take_device)
        yield ranks
    except BaseException as error:
        # when one process ends, torchrun terminates the rest: each is to end in its own way, with its own exit code
        if own and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if own and isinstance(error, agreed):  # to take leave of processes that do not know of it takes forever
            dist.destroy_process_group()
        raise
    if own:
        dist.destroy_process_group()


def _take_device() -> None:
    """Where there are GPUs, each process takes one."""
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if 0 < count <= number:
        raise ConfigError([Fault("--nproc-per-node", f"each process needs a GPU, and there is no more than {count}")])
    if count:
        torch.cuda.set_device(number)


# -- models that are shared out ---------------------------------------------------------------------------------------


def shard(model: Transformer, device: torch.device, compiled: bool, options: dict[str, Any] | None) -> None:
    """Leaves each process a part of every weight, and so of gradients and optimiser state (FSDP2).

    Blocks are gathered when they run, the rest for the whole pass. Precision stays with autocast: what the context
    carries beside the activations, such as angles, is then cast by nobody. What is gathered at once is compiled by
    itself: gathering cannot be.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for stack in (model.encoder, model.decoder):
        for block in stack.blocks if stack is not None else ():  # a block that several layers share is there once
            # torch before 2.13 takes no container, though it has a `forward`: its parts are then one group
            parts = list(block.children()) if isinstance(block, nn.ModuleDict) else [block]
            for part in parts if compiled else ():
                part.compile(options=options)
            fully_shard(parts, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sum_over_processes(x: Tensor) -> Tensor:
    """Return the differentiable sum of x over all processes, each of which reads a part of the batch."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    return all_reduce(x) if x.requires_grad else _summed(x)


@torch.no_grad()
def _summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def replicate(run: Any, ranks: Ranks) -> Any:
    """A model of which each process has all weights: gradients are averaged as they come (DDP)."""
    return run if ranks.size == 1 else DistributedDataParallel(run)


def syncing(run: Any, last: bool) -> AbstractContextManager[None]:
    """Around each pass of a step: copies of a model need to agree after the last one only."""
    return run.no_sync() if isinstance(run, DistributedDataParallel) and not last else nullcontext()


def whole(x: Tensor) -> Tensor:
    """A tensor with the parts of all processes."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def as_held(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as this process holds another one: where that is, and its part only."""
    x = x.to(like.device)
    return distribute_tensor(x, like.device_mesh, like.placements) if isinstance(like, DTensor) else x
