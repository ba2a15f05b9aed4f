"""Work of a training step on one GPU, from the config alone, and the time that it takes. Imports no torch.

    time = matmul FLOPs / (MATMUL_SHARE · peak) + attention FLOPs / (ATTENTION_SHARE · peak)
         + bytes / (BANDWIDTH_SHARE · bandwidth) + kernels · KERNEL_SECONDS

Nothing overlaps within a GPU, so a matmul with short rows or columns reaches a smaller share of the peak: its bytes
count beside its FLOPs.

    matmul        those of `count`; the backward pass has twice those of the forward pass
    attention     pairs of queries and keys that a kernel computes; the backward pass has 2.5 times as many FLOPs
    bytes         inputs, weights and outputs of matmuls and attention; norms and residual sums, whose stream is fp32;
                  activation functions, rotations and logits; weights cast to half precision, and their gradients
The update of the weights is in `estimate.py`.

b, t, s, d, h, g, k, f, v as in `config/__init__.py`.
"""

from dataclasses import astuple, dataclass
from operator import add
from typing import NamedTuple

from anyformer.config import (
    Block,
    ModelConfig,
    Side,
    Stack,
    pairs,
    pattern_across,
    pattern_of,
    position_of,
)
from anyformer.config.adapter import matrices
from anyformer.config.visibility import PAST
from anyformer.kernels.gpu_table import GPU
from anyformer.nn.inspection.cost_rules import block_costs, head_cost, pooled
from anyformer.nn.inspection.count import count

FP32 = 4  # bytes
MATMUL_SHARE = 0.75  # of the peak that a large matmul reaches: its power limits a GPU before its units do
ATTENTION_SHARE = 0.4  # of the peak that fused attention reaches, forward and backward together
BIASED_SHARE = 0.06  # the same with a learned bias of positions, by kernels that add a dense mask to all pairs
BANDWIDTH_SHARE = 0.85  # of the memory bandwidth that a copy reaches
KERNEL_SECONDS = 1e-6  # between two kernels of a captured step
ATTENTION_BACKWARD = 2.5  # times the FLOPs of its forward pass: five matmuls in place of two
KERNELS = 10, 22  # of a sublayer: forward, backward
EAGER_PASSES = 2.5  # times the elementwise bytes of a compiled step


@dataclass(frozen=True)
class PartWork:
    """FLOPs, bytes and kernels of a part of a step."""

    matmul: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    biased: float = 0.0  # attention with a learned bias

    def __add__(self, other: "PartWork") -> "PartWork":
        return PartWork(*map(add, astuple(self), astuple(other)))

    def __mul__(self, factor: float) -> "PartWork":
        return PartWork(*(factor * value for value in astuple(self)))

    def seconds(self, gpu: GPU, precision: str) -> float:
        peak = gpu.flops[precision]
        compute = self.matmul / (MATMUL_SHARE * peak) + self.attention / (ATTENTION_SHARE * peak)
        compute += self.biased / (BIASED_SHARE * peak)
        return compute + self.moved / (BANDWIDTH_SHARE * gpu.bandwidth) + self.kernels * KERNEL_SECONDS


class MicroBatch(NamedTuple):
    """Rows of a micro-batch."""

    batch: int
    length: int  # tokens of the target, or of the only side
    source_length: int | None = None  # tokens of the source, in an encoder-decoder
    context: int = 1  # GPUs that share the tokens of each row

    def lengths(self) -> dict[Side, int]:
        """Return the tokens of whole rows by side."""
        return {"encoder": self.source_length or self.length, "decoder": self.length}


class StepWork(NamedTuple):
    """Work of a micro-batch on one GPU."""

    blocks: PartWork  # forward pass of all layers, which checkpointing repeats
    forward: PartWork  # the layers and all else
    backward: PartWork


def step_work(config: ModelConfig, rows: MicroBatch, *, size: int = 2, compiled: bool = True) -> StepWork:
    """Return the work of a micro-batch on one GPU; `size` is the bytes of a value that is no weight."""
    lengths, passes = rows.lengths(), 1.0 if compiled else EAGER_PASSES
    blocks = backward = PartWork()
    for side, stack in config.stacks.items():
        for group in stack.distinct():
            t = pooled(lengths[side], stack, group.level)
            one = _Layer(config, side, stack, group.block, rows, t, lengths["encoder"], size)
            blocks, backward = blocks + one.forward(passes) * group.times, backward + one.backward(passes) * group.times
    table = count(config, rows.length, source_length=rows.source_length)
    tokens = rows.batch * sum(lengths[side] for side in config.stacks) / rows.context
    embedded = PartWork(moved=3 * FP32 * config.width * tokens)
    cast = PartWork(moved=(FP32 + size) * table.parameters * (size < FP32))
    gradients = PartWork(moved=(FP32 + 2 * size) * table.trained)
    head, head_back = _head(config, rows, size)
    forward = blocks + head + embedded + cast
    return StepWork(blocks, forward, backward + head_back + embedded + gradients)


class _Layer(NamedTuple):
    """One layer, whose side has t tokens in whole rows; the encoder has s."""

    config: ModelConfig
    side: Side
    stack: Stack
    block: Block
    rows: MicroBatch
    t: int
    s: int
    size: int

    @property
    def tokens(self) -> float:
        """Tokens on this GPU."""
        return self.rows.batch * self.t / self.rows.context

    def forward(self, passes: float) -> PartWork:
        d, size, rows = self.config.width, self.size, self.tokens
        costs = dict(
            block_costs(self.block.on(self.side, self.stack.position), d, self.rows.batch, self.t, self.s, self.side)
        )
        branches = len(costs) - 1  # all but the norms
        attention, biased, counted = self._attention()
        matmul = sum(cost.flops for cost in costs.values()) / self.rows.context - counted
        stream = rows * d * branches * 2 * (FP32 + size)  # read and written; the branch read, the norm written
        inner, gates = self._hidden()
        elementwise = stream + rows * inner * (2 + gates) * size + self._rotated()
        moved = passes * elementwise + self._matmul_bytes() + self._attention_bytes()
        return PartWork(matmul, attention, moved, branches * KERNELS[0], biased)

    def backward(self, passes: float) -> PartWork:
        ahead = self.forward(passes)
        d, size, rows = self.config.width, self.size, self.tokens
        branches = ahead.kernels / KERNELS[0]
        inner, gates = self._hidden()
        stream = rows * d * branches * (2 * FP32 + 3 * size)
        elementwise = stream + rows * inner * (3 + 2 * gates) * size + self._rotated()
        moved = passes * elementwise + 2 * self._matmul_bytes() + 3 * self._attention_bytes()
        attention, biased = (ATTENTION_BACKWARD * flops for flops in (ahead.attention, ahead.biased))
        return PartWork(2 * ahead.matmul, attention, moved, branches * KERNELS[1], biased)

    def _keys(self, name: str) -> int:
        """Return the number of keys of an attention by its name in the block."""
        return self.s if name == "cross" else self.t

    def _attention(self) -> tuple[float, float, float]:
        """Return the FLOPs that attention kernels compute, without and with a bias, and those of `count`."""
        computed = biased = counted = 0.0
        for name, a in self.block.attentions():
            keys, across = self._keys(name), name == "cross"
            pattern = pattern_across(a) if across else pattern_of(a, self.side)
            flops = (
                2.0 * self.rows.batch * a.heads * pairs(pattern, self.t, keys) * sum(a.kernel_widths(self.config.width))
            )
            flops /= self.rows.context
            counted += flops
            if not across and position_of(a, self.stack).learns_scores:
                biased += flops
            else:
                computed += flops / 2 if pattern.as_window == PAST else flops  # kernels skip what no query sees
        return computed, biased, counted

    def _attention_bytes(self) -> float:
        """Return the bytes of queries, keys, values and outputs."""
        values = 0.0
        for name, a in self.block.attentions():
            own = self.tokens * a.heads + self.rows.batch * self._keys(name) * a.groups
            values += own * sum(a.kernel_widths(self.config.width))
        return values * self.size

    def _matmul_bytes(self) -> float:
        """Return the bytes of inputs, weights and outputs of the linear layers."""
        total, d, rows = 0.0, self.config.width, self.tokens
        source_rows = self.rows.batch * self.s / self.rows.context
        for _, inputs, outputs, across, fixed, _ in matrices(self.block, d, self.stack.position):
            total += (fixed or (source_rows if across else rows)) * (inputs + outputs) + inputs * outputs
        if stacked := [*self.block.feedforward.stacked_matrices(d)]:
            inner, gates = self._hidden()
            total += rows * (2 * d * self.block.feedforward.choices_per_token + inner * (2 + gates))
            total += sum(number * matrix.inputs * matrix.outputs for number, matrix in stacked)
        return total * self.size

    def _hidden(self) -> tuple[int, int]:
        """Return the hidden values of the feed-forward for each token, and 1 if it has a gate."""
        spec = self.block.feedforward
        return spec.hidden_values(self.config.width), spec.hidden_network.gates if spec.hidden_network else 0

    def _rotated(self) -> float:
        """Return the bytes of rotating queries and keys."""
        mixer = self.block.attention
        if mixer is None or not position_of(mixer, self.stack).rotates():
            return 0.0
        return 2.0 * self.tokens * (mixer.heads + mixer.groups) * mixer.widths(self.config.width)[0] * self.size


def _head(config: ModelConfig, rows: MicroBatch, size: int) -> tuple[PartWork, PartWork]:
    """Return the work of the head and its loss, forward and backward."""
    read = config.last_input
    if (d := config.head.table_width(config.width, read)) is None:
        flops = head_cost(config, rows.batch, rows.length).flops / rows.context
        return PartWork(flops, kernels=KERNELS[0]), PartWork(2 * flops, kernels=KERNELS[1])
    share = config.head.labelled / rows.context
    labelled, v = rows.batch * rows.length * share, read.rows
    flops = head_cost(config, rows.batch, rows.length).flops * share
    matmul = size * (labelled * (d + v) + d * v)
    logits = size * labelled * v  # read for the normaliser; read and written as a gradient
    forward = PartWork(flops, moved=matmul + logits, kernels=KERNELS[0])
    return forward, PartWork(2 * flops, moved=2 * matmul + 2 * logits, kernels=KERNELS[1])
