"""Split of a training step among GPUs: the part of the model and the memory of each. Imports no torch.

    world size = data · context · tensor, with neighbouring ranks along `tensor`, as in `training/ranks/mesh.py`

A part of a model that is split along `tensor` is itself a model with fewer heads, a narrower feed-forward and a smaller
vocabulary, so `count` and `training_memory` apply to it. Norms and the residual stream are on every GPU. Experts are
counted as if each were narrower.

Memory beside that of `training_memory`, which is of one GPU:

    shard = full   each GPU holds its part of weights, gradients and optimiser state; two layers and all that is outside
                   the layers are gathered. Without recomputation the backward pass keeps the weights in half precision
    shard = none   DDP has a second copy of the gradients for its messages
    accumulate     gradients exist during all but the first pass
    tensor         the loss is not fused: LOGIT_BYTES for each logit of a GPU's part of the vocabulary
    context        keys and values of whole rows, of one layer
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from anyformer.config import (
    Block,
    ModelConfig,
    Special,
    Stack,
)
from anyformer.nn.inspection.cost_rules import block_costs
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.memory import ADAMW, Precision, training_memory
from anyformer.recipe import Optimizer
from anyformer.recipe.recipe import tensor_faults
from anyformer.training.forecast.work import FP32, MicroBatch

LOGIT_BYTES = 16  # the logits in half precision and in fp32, their exponentials and a gradient
GATHERED_LAYERS = 2  # the one that runs and the next


@dataclass(frozen=True)
class Split:
    """How a step is divided among GPUs, and into micro-batches."""

    data: int = 1  # groups of GPUs that read different rows
    context: int = 1  # GPUs that share the tokens of each row
    tensor: int = 1  # GPUs that share the weights of each layer
    sharded: bool = False  # FSDP in place of DDP
    rows: int = 1  # of a micro-batch in one group along `data`
    accumulate: int = 1  # micro-batches
    recompute: bool = False

    @property
    def gpus(self) -> int:
        return self.data * self.context * self.tensor

    @property
    def copies(self) -> int:
        """GPUs that work with the same weights on different tokens."""
        return self.data * self.context

    @property
    def shards(self) -> int:
        """Parts into which weights, gradients and optimiser state are divided among these."""
        return self.copies if self.sharded else 1

    def __str__(self) -> str:
        kind = "FSDP" if self.sharded else "DDP"
        axes = [f"{kind} {self.data}"] if self.data > 1 or self.shards > 1 else []
        axes += [f"{name} {n}" for name in ("context", "tensor") if (n := getattr(self, name)) > 1]
        return " × ".join(axes or ["1 GPU"])


def can_split_layers(config: ModelConfig, n: int) -> bool:
    """Return whether training can split a model into n parts along `tensor`; parts of other mixers are not counted."""
    return all(block.attention for block in _blocks(config)) and not any(tensor_faults(config, n))


@cache
def tensor_part(config: ModelConfig, n: int) -> ModelConfig:
    """Return one of n parts of a model, split along `tensor`."""
    if n == 1:
        return config
    changes: dict[str, object] = {"special": Special()}
    for side, stack in config.stacks.items():
        changes[side] = _stack_part(stack, config.width, n)
    changes |= {name: read.share(n) for name, read in config.inputs.items()}
    return config.model_copy(update=changes)


def _stack_part(stack: Stack, d: int, n: int) -> Stack:
    def part(block: Block) -> Block:
        changes: dict[str, object] = {"feedforward": block.feedforward.share(d, n)}
        for name, a in block.attentions():
            k, k_v = a.widths(d)
            heads = {"heads": a.heads // n, "kv_heads": a.groups // n, "key_width": k, "value_width": k_v}
            changes[name] = a.model_copy(update=heads)
        return block.model_copy(update=changes)

    return stack.model_copy(update={"blocks": (*map(part, stack.blocks),), "prefix": (*map(part, stack.prefix),)})


def _blocks(config: ModelConfig) -> Iterator[Block]:
    for stack in config.stacks.values():
        yield from (*stack.prefix, *stack.blocks)


@dataclass(frozen=True)
class Weights:
    """Numbers of weights of one part along `tensor`."""

    total: int
    trained: int
    layers: int  # in all layers; the rest is outside of them
    largest: int  # in the largest layer
    count: int  # of layers


@cache
def part_weights(config: ModelConfig, n: int) -> Weights:
    """Return the weights of one of n parts."""
    part = tensor_part(config, n)
    table, layers, sizes, number = count(part), 0, list[int](), 0
    for side, stack in part.stacks.items():
        for group in stack.distinct():
            costs = block_costs(group.block, part.width, 1, 1, 1, side)
            sizes.append(sum(cost.parameters for _, cost in costs))
            layers, number = layers + sizes[-1] * group.own, number + group.times
    return Weights(table.parameters, table.trained, layers, max(sizes), number)


def step_memory(
    config: ModelConfig,
    rows: MicroBatch,
    split: Split,
    precision: Precision,
    compiled: bool,
    optimizer: Optimizer = ADAMW,
) -> float:
    """Return the peak bytes of a training step on each GPU."""
    n, shards = split.tensor, split.shards
    part = _training_memory(
        tensor_part(config, n),
        rows.length,
        batch=rows.batch,
        source_length=rows.source_length,
        precision=precision,
        compiled=compiled,
        recompute=split.recompute,
        context=rows.context,
        optimizer=optimizer,
    )
    weights = part_weights(config, n)
    fixed, gradients, casts = (part.weights + part.optimizer) / shards, part.gradients / shards, float(part.casts)
    if shards > 1:
        kept = weights.total - weights.layers + GATHERED_LAYERS * weights.largest
        fixed += FP32 * kept
        if split.recompute:
            casts *= kept / weights.total
    elif split.copies > 1:
        fixed += gradients
    if split.accumulate > 1:
        fixed, gradients = fixed + gradients, 0.0
    size = FP32 if precision == "fp32" else 2
    more = size * max((values for values, _ in gathered_values(config, rows, n)), default=0.0)
    if n > 1 and config.head.predicts_tokens:
        more += LOGIT_BYTES * config.head.labelled * rows.batch * rows.length / rows.context * config.vocab / n
    return more + max(fixed + casts + part.activations + part.passing, fixed + gradients + part.ending)


_training_memory = cache(training_memory)


def gathered_values(config: ModelConfig, rows: MicroBatch, n: int) -> Iterator[tuple[float, int]]:
    """Yield the number of keys and values that a layer gathers along `context`, and the number of equal layers.

    n is the number of parts along `tensor`.
    """
    lengths = rows.lengths()
    for side, stack in config.stacks.items() if rows.context > 1 else ():
        for group in stack.distinct():
            keys = [(a, lengths["encoder" if name == "cross" else side]) for name, a in group.block.attentions()]
            yield sum(rows.batch * s * a.groups / n * sum(a.widths(config.width)) for a, s in keys), group.times
