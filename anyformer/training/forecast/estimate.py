"""Forecast of a training run for one split: memory, time, tokens per second, price. Imports no torch.

Communication, and how much of it overlaps with computation:

    FSDP      the weights of each layer are gathered in fp32 before its forward pass and before its backward pass, and
              its gradients reduced and scattered, in every micro-batch. Each runs beside the computation of another
              layer, so only what takes longer than the computation adds time, and one layer at either end
    DDP       gradients are summed once a step, beside the last backward pass
    tensor    activations are summed after each sublayer, forward and backward; nothing runs meanwhile
    context   keys and values are gathered in the forward pass and again in the backward pass, where their gradients are
              scattered; nothing runs meanwhile, and nothing is compiled

Several processes launch kernels one by one, without a CUDA graph: a pass takes at least `LAUNCH_SECONDS` per kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil, log2
from typing import NamedTuple

from anyformer.config import ModelConfig
from anyformer.kernels.gpu_table import GPU
from anyformer.nn.inspection.memory import trained_weights
from anyformer.recipe import Optimizer, Update
from anyformer.recipe.recipe import context_faults
from anyformer.training.forecast.split import (
    Split,
    can_split_layers,
    gathered_values,
    part_weights,
    step_memory,
    tensor_part,
)
from anyformer.training.forecast.work import FP32, MicroBatch, PartWork, step_work
from anyformer.training.forecast.workload import Workload

LAUNCH_SECONDS = 8e-6  # of the CPU, for a kernel of compiled code
SHARD_KERNELS = 10  # of FSDP, for each layer in a pass
BUCKET_BYTES = 25e6  # gradients that DDP sends at a time
SPARE_SHARE, SPARE_BYTES = 0.05, 1e9  # memory for fragments, and for the libraries of a process
SECONDS_PER_DAY = 86_400


class TrainingEngine(NamedTuple):
    """Properties of a training engine; those of others serve the comparison with published runs."""

    gather_bytes: int = FP32  # of a weight, in FSDP's messages
    reduce_bytes: int = FP32  # of a gradient
    builds_whole: bool = True  # each process builds the whole model on its GPU before it keeps a part


OURS = TrainingEngine()
_step_work = cache(step_work)


@dataclass(frozen=True)
class Forecast:
    """Memory and time of a step, on each GPU."""

    split: Split
    memory: float  # peak bytes
    compute: float  # seconds
    hidden: float  # seconds of communication during computation
    communication: float  # seconds of all other communication
    tokens_per_second: float  # over all GPUs
    mfu: float  # model FLOPs utilisation: 3 × forward FLOPs ÷ time ÷ peak of the data sheet

    @property
    def seconds(self) -> float:
        return self.compute + self.communication

    def fits(self, gpu: GPU) -> bool:
        return self.memory * (1 + SPARE_SHARE) + SPARE_BYTES <= gpu.memory

    def days(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / SECONDS_PER_DAY

    def price(self, tokens: float, rate: float) -> float:
        """Return the price at `rate` for an hour of one GPU."""
        return 24 * self.days(tokens) * self.split.gpus * rate


def forecast(work: Workload, gpu: GPU, split: Split, engine: TrainingEngine = OURS) -> Forecast:
    """Return the forecast of a step for one split."""
    rows = MicroBatch(split.rows, work.length, work.source_length, split.context)
    compiled = work.compiled and split.context == 1  # as in `training/prepare.py`
    one = _step_work(tensor_part(work.config, split.tensor), rows, size=work.size, compiled=compiled)
    ahead = _pass_seconds(one.forward, gpu, work, split)
    back = _pass_seconds(one.backward + (one.blocks if split.recompute else PartWork()), gpu, work, split)
    compute = split.accumulate * (ahead + back)
    compute += update_work(work.config, work.optimizer, split).seconds(gpu, work.precision)
    hidden, shown = _weight_messages(work, gpu, split, (ahead, back), engine)
    shown += split.accumulate * _activation_messages(work, gpu, split, rows)
    shown += update_messages(work.config, work.optimizer, split, gpu)
    seconds = compute + shown
    memory = step_memory(work.config, rows, split, work.half, compiled, work.optimizer)
    if work.averaged:
        memory += FP32 * part_weights(work.config, split.tensor).total / split.shards
    if engine.builds_whole:
        memory = max(memory, FP32 * part_weights(work.config, 1).total)
    mfu = work.flops / seconds / split.gpus / gpu.flops[work.precision]
    return Forecast(split, memory, compute, hidden, shown, work.step_tokens / seconds, mfu)


def _pass_seconds(work: PartWork, gpu: GPU, run: Workload, split: Split) -> float:
    seconds = work.seconds(gpu, run.precision)
    if split.gpus == 1 and run.compiled:
        return seconds
    layers = sum(stack.depth for stack in run.config.stacks.values())
    return max(seconds, (work.kernels + layers * SHARD_KERNELS * split.sharded) * LAUNCH_SECONDS)


def _weight_messages(
    work: Workload, gpu: GPU, split: Split, passes: tuple[float, float], engine: TrainingEngine
) -> tuple[float, float]:
    """Return the seconds of communication of weights and gradients: during the passes, and beyond them."""
    weights = part_weights(work.config, split.tensor)
    group = Group(gpu, split.copies, split.tensor)
    if split.copies == 1:
        return 0.0, 0.0
    ahead, back = passes
    if split.shards == 1:
        total = group.all_reduce(FP32 * weights.trained, FP32 * weights.trained / BUCKET_BYTES)
        last = min(total, group.all_reduce(BUCKET_BYTES))  # the first layer's gradients, when all else is done
        shown = max(last, total - back)
        return total - shown, shown
    units = weights.count + 1  # and all that is outside the layers
    gather = group.gather(engine.gather_bytes * weights.total, units)
    reduce = group.gather(engine.reduce_bytes * weights.trained, units)
    both = max(weights.largest, weights.total - weights.layers)  # the first gathered, and the last reduced
    ends = group.gather(engine.gather_bytes * both) + group.gather(engine.reduce_bytes * both)
    shown = split.accumulate * min(
        2 * gather + reduce, ends + max(0.0, gather - ahead) + max(0, gather + reduce - back)
    )
    return split.accumulate * (2 * gather + reduce) - shown, shown


def _activation_messages(work: Workload, gpu: GPU, split: Split, rows: MicroBatch) -> float:
    """Return the seconds of communication of activations in a micro-batch, along `tensor` and `context`."""
    config, times = work.config, 1 + split.recompute
    lengths, seconds = rows.lengths(), 0.0
    tensor = Group(gpu, split.tensor)
    for side, stack in config.stacks.items() if split.tensor > 1 else ():
        stream = rows.batch * lengths[side] / rows.context * config.width
        sublayers = sum(2 + (block.cross is not None) for block in stack.unrolled())
        calls = sublayers * (1 + times)  # the outputs of a forward pass, and the gradients of the inputs
        seconds += tensor.all_reduce(stream * work.size * calls, calls)
        seconds += tensor.all_reduce(stream * (FP32 + work.size), 2)  # embeddings, and the gradient of the head's input
    context = Group(gpu, split.context, split.tensor)
    for values, layers in gathered_values(config, rows, split.tensor):
        seconds += layers * (2 + times) * context.gather(values * work.size, 2)
    return seconds


# -- the network ------------------------------------------------------------------------------------------------------
#
# Time of collective operations among GPUs.
#
#     gather, scatter    bytes · (n - 1) / n / (LINK_SHARE · link) + hops · latency, in a ring through all n GPUs
#     all-reduce         twice the bytes; its latency is that of a tree between nodes
#
# The ranks of a group are `stride` apart. A group within a node uses its links. A larger group uses the network of all
# its GPUs in a node together, so with r of them it has r times the network of one, and at most the links of the node.


LINK_SHARE = 0.8  # of a link's bandwidth that large messages reach
NODE_HOP, NETWORK_HOP = 2e-6, 5e-6  # seconds, as in the cost model of NCCL (protocol LL128)


@dataclass(frozen=True)
class Group:
    """A group of `size` GPUs that are `stride` ranks apart."""

    gpu: GPU
    size: int
    stride: int = 1

    @property
    def per_node(self) -> int:
        """GPUs of the group in one node."""
        return max(1, min(self.size, self.gpu.node // self.stride))

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)

    @property
    def bandwidth(self) -> float:
        if self.nodes == 1:
            return LINK_SHARE * self.gpu.link
        network = self.per_node * self.gpu.network
        return LINK_SHARE * (min(self.gpu.link, network) if self.per_node > 1 else network)

    def gather(self, size: float, calls: float = 1) -> float:
        """Return the seconds to gather, or to reduce and scatter, `size` bytes in `calls` calls."""
        if self.size == 1:
            return 0.0
        hops = (self.size - self.nodes) * NODE_HOP + (self.nodes - (self.nodes == 1)) * NETWORK_HOP
        return size * (self.size - 1) / self.size / self.bandwidth + calls * hops

    def all_reduce(self, size: float, calls: float = 1) -> float:
        """Return the seconds to sum `size` bytes on all GPUs in `calls` calls."""
        if self.size == 1:
            return 0.0
        hops = 2 * (self.per_node - 1) * NODE_HOP + 2 * log2(self.nodes) * NETWORK_HOP
        return 2 * size * (self.size - 1) / self.size / self.bandwidth + calls * hops


# -- the update -------------------------------------------------------------------------------------------------------


CLIPPED = 3  # values that clipping moves for each weight: it reads two and writes one


def update_work(config: ModelConfig, optimizer: Optimizer, split: Split) -> PartWork:
    """Return the work of a step of the optimiser on one GPU."""
    update, own = _update(config, optimizer, split)
    return PartWork(update.flops, moved=FP32 * (update.moved + CLIPPED * own), kernels=update.kernels)


def update_messages(config: ModelConfig, optimizer: Optimizer, split: Split, gpu: GPU) -> float:
    """Return the seconds in which updates of divided matrices are gathered, in fp32."""
    matrices, parts = _update(config, optimizer, split)[0].gathered, split.tensor * split.shards
    if not matrices or parts == 1:
        return 0.0
    return Group(gpu, parts).gather(FP32 * sum(matrix.values for matrix in matrices), len(matrices))


def _update(config: ModelConfig, optimizer: Optimizer, split: Split) -> tuple[Update, float]:
    """Return the update, and the number of weights that one GPU updates."""
    own = part_weights(config, split.tensor).trained / split.shards
    return optimizer.update(trained_weights(config), own, split.tensor * split.shards), own


EQUAL_SPEED = 0.97  # of the most tokens per second, from which a simpler split is preferred
MIN_CONTEXT_TOKENS = 256  # of a row on each GPU: below, attention waits for its messages


@dataclass(frozen=True)
class NoSplit:
    """A number of GPUs for which nothing fits, and why."""

    gpus: int
    reason: str


def best_split(work: Workload, gpu: GPU, gpus: int, engine: TrainingEngine = OURS) -> Forecast | NoSplit:
    """Return the forecast of the fastest split that fits into memory."""
    found = list(_forecasts(work, gpu, gpus, engine))
    fitting = [one for one in found if one.fits(gpu)]
    if fitting:
        # the simplest of those whose forecasts differ by less than their error
        fastest = max(one.tokens_per_second for one in fitting)
        close = [one for one in fitting if one.tokens_per_second > EQUAL_SPEED * fastest]
        return min(close, key=lambda one: (_complexity(one.split), -one.tokens_per_second))
    if not found:
        return NoSplit(gpus, f"{work.rows:,} rows of a step cannot be divided among them: give --batch more rows")
    least = min(one.memory for one in found)
    return NoSplit(gpus, f"at least {least / 2**30:.0f} GiB on each GPU")


def _complexity(split: Split) -> tuple[int, bool, bool, int]:
    return split.context * split.tensor, split.recompute, split.sharded, split.accumulate


def _forecasts(work: Workload, gpu: GPU, gpus: int, engine: TrainingEngine) -> Iterator[Forecast]:
    """Yield the forecasts of all splits that fit, and of the smallest micro-batches that do not."""
    for (tensor, context, sharded), recompute in product(_meshes(work, gpu, gpus), (False, True)):
        data = gpus // (tensor * context)
        if data > work.rows:
            continue
        own = -(-work.rows // data)  # of the processes with the most rows
        uneven = work.rows % data > 0
        for rows in [own] if uneven else [n for n in range(1, own + 1) if own % n == 0]:
            split = Split(data, context, tensor, sharded, rows, own // rows, recompute)
            yield (one := forecast(work, gpu, split, engine))
            if not one.fits(gpu):
                break  # and neither do more rows


def _meshes(work: Workload, gpu: GPU, gpus: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the sizes along `tensor` and `context`, and whether weights are sharded."""
    for tensor in (n for n in _powers(min(gpus, gpu.node)) if n == 1 or can_split_layers(work.config, n)):
        for context in _powers(gpus // tensor):
            if gpus % (tensor * context) == 0 and _divides(work, context):
                yield from ((tensor, context, sharded) for sharded in (False, True) if gpus > tensor or not sharded)


def _divides(work: Workload, context: int) -> bool:
    """Return whether all rows can be split into `context` parts, each of two chunks."""
    if context == 1:
        return True
    lengths = (work.length, work.source_length or work.length)
    long = all(n % (2 * context) == 0 and n // context >= MIN_CONTEXT_TOKENS for n in lengths)
    return long and not any(context_faults(work.config))


def _powers(limit: int) -> list[int]:
    """Return the powers of two up to a limit."""
    return [2**i for i in range(limit.bit_length())]
