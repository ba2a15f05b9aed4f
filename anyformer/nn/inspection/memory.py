"""Peak memory of a training step, estimated from the config alone, and models that do not fit. Imports no torch.

    weights       in fp32
    optimizer     its state in fp32: of AdamW two values for each weight (`recipe/optimizer.py`)
    casts         copies of the weights in half precision, which the backward pass reads
    activations   tensors saved for the backward pass: those of `count`, and the ones it leaves out. The residual stream
                  is fp32 in any precision, so norms save it in fp32 unless compiled; dropout masks, one byte per value,
                  unless compiled; the log-sum-exp of attention; a fused q/k/v projection, which stays allocated after
                  queries and keys are rotated because the values are a view of it
    passing       the largest transient allocation while all of the above exist: the logits of the loss, or the
                  gradients within a layer; with `recompute` also the activations of one layer
    masks         with `context`, which splits rows among processes: between the tokens of one process and whole rows,
                  once for each kind of pattern that is not full. Beyond MAX_MASK_PAIRS `flex` stores none on a GPU.
                  Keys and values of whole rows are not saved: the backward pass gathers them again
    gradients     of all weights, after the backward pass of the first layer, when no activations are left
    ending        all else that exists then: the gradients within the first layer, and its input

The peak is at the loss or in the backward pass of the last layer; with many weights and few tokens it is at the end of
the backward pass. Left out: biases on scores between all tokens, attention weights that no kernel avoids storing (ReLU
in place of softmax), and library workspaces, about 50 MB on a GPU.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from anyformer.config import (
    Block,
    ConfigError,
    Fault,
    ModelConfig,
    Network,
    Norm,
    Relu,
    Side,
    Stack,
    pattern_of,
    position_of,
)
from anyformer.config.adapter import every_matrix
from anyformer.config.model import tower_config
from anyformer.config.visibility import EVERYTHING
from anyformer.kernels.hardware import usable_memory
from anyformer.nn.inspection.cost_rules import block_costs, head_cost, pooled, side_costs
from anyformer.nn.inspection.count import BYTES, count, human
from anyformer.recipe.optimizer import AdamW, HiddenMatrix, Optimizer, WeightCounts

Precision = Literal["fp32", "bf16"]
FP32, MASK = 4, 1  # bytes
MAX_LOGIT_BYTES = 2**33  # bytes of logits that the loss computes at a time in half precision
MAX_MASK_PAIRS = 2**20  # queries × keys, from which `flex` takes the place of a dense mask
ADAMW = AdamW(lr=1e-3)  # its state does not depend on the settings


# Parts of the peak, as they are printed.
LABELS = {
    "weights": "weights",
    "optimizer": "optimizer",
    "casts": "half-precision copies of weights",
    "activations": "activations",
    "passing": "largest temporary tensors",
}


@dataclass(frozen=True)
class Memory:
    """Peak memory of a training step and its parts, in bytes."""

    weights: int
    optimizer: int
    casts: int
    activations: int
    passing: int
    gradients: int
    ending: int
    peak: int
    precision: Precision
    compiled: bool
    recompute: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        parts = {label: getattr(self, name) for name, label in LABELS.items()}
        end = "" if self.peak == sum(parts.values()) else ", at the end with all gradients"
        how = [self.precision, "compiled" if self.compiled else "eager", *(["recomputed"] if self.recompute else [])]
        listed = ", ".join(f"{label} {human(n, 1024, BYTES)}" for label, n in parts.items() if n)
        return f"training ({', '.join(how)}): {human(self.peak, 1024, BYTES)} at the peak{end}: {listed}"


class _Mode(NamedTuple):
    size: int  # bytes of one activation value
    compiled: bool

    @property
    def dropout(self) -> int:
        """Bytes of one value of a dropout mask, which compiled code computes again."""
        return 0 if self.compiled else MASK


def training_memory(
    config: ModelConfig,
    length: int | None = None,
    *,
    batch: int = 1,
    source_length: int | None = None,
    precision: Precision = "bf16",
    compiled: bool = True,
    recompute: bool = False,
    asked: float | None = None,
    context: int = 1,
    optimizer: Optimizer = ADAMW,
) -> Memory:
    """Return the peak memory of a training step on a GPU, computed from the config alone. Weights are fp32.

    Args:
        config: the model, which is not built.
        length: tokens of a row, as in `count`.
        batch: rows.
        source_length: tokens of a source, as in `count`.
        precision: "fp32", or "bf16" for matmuls in half precision.
        compiled: whether the step is compiled.
        recompute: `train.checkpoint_activations` of a recipe.
        asked: the share of tokens that have a label; None: 15 % for a masked language model, else all.
        context: `parallel.context`; the result is of one of these processes.
        optimizer: `train.optimizer` of a recipe.

    Returns:
        Bytes of weights, optimiser state, activations and other parts, and their `peak`.

    Raises:
        ConfigError: sizes do not fit the model, as in `count`.

    Example:
        >>> config = af.presets.gpt2()
        >>> memory = af.training_memory(config, 1024, batch=8)
        >>> af.training_memory(config, 1024, batch=8, recompute=True).peak < memory.peak
        True
    """
    table = count(config, length, batch=batch, source_length=source_length)
    mode = _Mode(2 if precision == "bf16" else FP32, compiled)
    lengths: dict[Side, int] = {"encoder": table.source_length or table.length, "decoder": table.length}
    masks = _mask_bytes(config, lengths, context, mode)
    lengths = {side: -(-n // (2 * context)) * 2 if context > 1 else n for side, n in lengths.items()}
    last = list(config.stacks)[-1]
    sides = [_SideMemory.of(config, side, stack, batch, lengths[side], lengths["encoder"], mode)
             for side, stack in config.stacks.items()]  # fmt: skip
    rows = batch * lengths[last]
    asked = config.head.labelled if asked is None else asked
    head = _HeadMemory.of(config, rows, int(rows * asked), mode)
    layers = [layer for side in sides for layer in side.layers]
    inputs = sum(side.inputs for side in sides)
    activations = (
        sum(side.outside for side in sides)
        + head.saved
        + masks
        + (inputs if recompute else sum(n * count for n, count in layers))
    )
    in_layer = max(_layer_gradients(block, config.width, batch, lengths[side], mode) for side, block in _blocks(config))
    passing = max(head.passing, head.after + in_layer + recompute * max(n for n, _ in layers))
    weights, gradients = FP32 * table.parameters, FP32 * table.trained
    casts = 0 if precision == "fp32" else mode.size * _multiplied(config, batch, lengths, table.parameters)
    state = FP32 * optimizer.state(trained_weights(config))
    fixed, ending = weights + state, head.twice + in_layer + sides[0].outside + layers[0][0]
    peak = max(fixed + casts + activations + passing, fixed + gradients + ending)
    parts = weights, state, casts, activations, passing, gradients, ending
    return Memory(*parts, peak, precision, compiled, recompute)


def _mask_bytes(config: ModelConfig, lengths: dict[Side, int], context: int, mode: _Mode) -> int:
    """Return the bytes of the masks between the tokens of one process and whole rows."""
    pairs = {side: n * -(-n // context) for side, n in lengths.items()}
    patterns = {(side, pattern_of(a, side)) for side, block in _blocks(config) if (a := block.attention)}
    masked = [side for side, pattern in patterns if pattern.as_window != EVERYTHING and pairs[side] < MAX_MASK_PAIRS]
    return mode.size * sum(pairs[side] for side in masked) if context > 1 else 0


def _blocks(config: ModelConfig) -> Iterator[tuple[Side, Block]]:
    for side, stack in config.stacks.items():
        for block in {*stack.prefix, *stack.blocks}:
            yield side, block


def _multiplied(config: ModelConfig, b: int, lengths: dict[Side, int], parameters: int) -> int:
    """Return the number of weights that enter a matmul: all but lookup tables."""
    looked_up = sum(
        cost.parameters
        for side, stack in config.stacks.items()
        for part, _, cost in side_costs(config, side, stack, b, lengths[side], lengths["encoder"])
        if part.endswith(("embeddings", "positions"))
    )
    return parameters - looked_up


class _SideMemory(NamedTuple):
    """Bytes saved for the backward pass of one side (encoder or decoder)."""

    layers: tuple[tuple[int, int], ...]  # bytes of one layer, and the number of equal layers
    inputs: int  # of all layers: the only activations saved with `recompute`
    outside: int  # embeddings, final norm, encoder output

    @classmethod
    def of(cls, config: ModelConfig, side: Side, stack: Stack, b: int, t: int, s: int, mode: _Mode) -> "_SideMemory":
        d, layers, inputs = config.width, list[tuple[int, int]](), 0
        for group in stack.distinct():
            tokens = pooled(t, stack, group.level)
            layers.append((_block(group.block, stack, d, b, tokens, s, side, mode), group.times))
            inputs += b * tokens * d * FP32 * group.times
        read = config.source if side == "encoder" else config.target
        assert read is not None
        outside = b * t * d * mode.dropout * ((getattr(read, "dropout", 0) > 0) + (stack.dropout > 0))
        names = f"{'source' if side == 'encoder' else 'target'} embeddings", f"{side} final norm"
        for part, _, cost in side_costs(config, side, stack, b, t, s):
            if part in names:  # nearly all of this is in norms
                norm = stack.final_norm
                outside += cost.saved * _norm_input_bytes(norm, mode) * norm.saves(mode.compiled)
            elif part == "encoder output":
                outside += cost.saved * mode.size
        return cls(tuple(layers), inputs, outside)


def _block(block: Block, stack: Stack, d: int, b: int, t: int, s: int, side: Side, mode: _Mode) -> int:
    """Return the bytes that one layer saves for the backward pass."""
    rows, size = b * t, mode.size
    costs = dict(block_costs(block, d, b, t, s, side))
    norms = costs.pop("norms").saved
    branches = len(costs)
    saved = size * sum(cost.saved for cost in costs.values())
    stream = {"pre": 1.0, "post": 1.0, "branch": 0.0, "sandwich": 0.5}[block.placement]  # norms that read it
    saved += int(norms * (size + stream * (_norm_input_bytes(block.norm, mode) - size)))
    saved += norms * FP32 * (block.norm.saves(mode.compiled) - 1)
    saved += rows * d * mode.dropout * branches * (block.dropout > 0)
    for name, a in block.attentions():
        saved += FP32 * rows * a.heads
        if name == "mixer" and position_of(a, stack).rotates() and a.qk_norm.is_none:
            saved += size * b * t * (a.heads + a.groups) * a.widths(d)[0]
    spec = block.feedforward
    if isinstance(spec, Network):
        f = rows * spec.hidden(d)
        saved += f * mode.dropout * (spec.dropout > 0)
        if mode.compiled and spec.gates:
            saved -= f * size  # the activated gate is recomputed
        elif mode.compiled and isinstance(spec.activation, Relu) and (size == FP32 or not spec.bias or spec.dropout):
            saved += f * MASK  # where the input was positive, unless the saved output shows it
    return saved


def _norm_input_bytes(norm: Norm, mode: _Mode) -> int:
    """Return the bytes per value in which a norm saves the residual stream."""
    return mode.size if mode.compiled and norm.narrows else FP32


def _layer_gradients(block: Block, d: int, b: int, t: int, mode: _Mode) -> int:
    """Return the bytes of gradients that exist at once in the backward pass of one layer."""
    spec, rows = block.feedforward, b * t
    f = one.hidden(d) * (1 + one.gates) * spec.choices_per_token if (one := spec.hidden_network) else 0
    return rows * (2 * max(f, 4 * d) * mode.size + 2 * d * FP32)


class _HeadMemory(NamedTuple):
    """Bytes of a head and its loss."""

    saved: int
    passing: int  # while the loss is computed
    after: int  # gradients left when the backward pass of the last layer begins
    twice: int  # a tied table has two gradients until they are added

    @classmethod
    def of(cls, config: ModelConfig, rows: int, asked: int, mode: _Mode) -> "_HeadMemory":
        head, read = config.head, config.last_input
        if (e := head.table_width(config.width, read)) is None:
            cost = head_cost(config, 1, rows)  # an upper bound for pooled rows, and small in any case
            return cls(cost.saved * mode.size, 0, FP32 * cost.parameters, 0)
        v, tied = read.rows, config.ties_output
        padded = tied and read.padding is not None  # needs a copy of the table, whose padding row is not trained
        saved = mode.size * (head_cost(config, 1, asked).saved - asked * v)
        table, logits = e * v, asked * v
        after, twice = FP32 * table, FP32 * table * tied
        if mode.size == FP32:
            saved += FP32 * table * padded
            return cls(saved + logits * FP32, logits * FP32 * (1 if mode.compiled else 2), after, twice)
        if head.soft_cap is not None:
            return cls(saved + logits * 6, logits * (6 if mode.compiled else 10), after, twice)
        chunks = max(1, -(-logits * mode.size // MAX_LOGIT_BYTES))
        gradients = table * (mode.size if chunks == 1 else chunks * (mode.size + FP32))
        copies = table * mode.size * tied + asked * e * mode.size + table * FP32 * (padded and not mode.compiled)
        return cls(saved, -(-logits // chunks) * mode.size + gradients + copies, after, twice)


def trained_weights(config: ModelConfig) -> WeightCounts:
    """Return the trained weights of a model: with an adapter its own and a new head."""
    if config.adapter:
        return WeightCounts(count(config).trained)
    return WeightCounts(count(config).trained, partial(hidden_matrices, config), tuple(_token_tables(config)))


def hidden_matrices(config: ModelConfig) -> Iterator[HiddenMatrix]:
    """Yield the weights of linear layers and experts in all blocks; those that layers share occur once."""
    d = config.width
    for matrix in every_matrix(config.stacks, d).values():
        yield HiddenMatrix(1, matrix.outputs, matrix.inputs)
    for stack in config.stacks.values():
        for group in stack.distinct():
            for _ in range(group.own):
                for number, matrix in group.block.feedforward.stacked_matrices(d):
                    yield HiddenMatrix(number, matrix.outputs, matrix.inputs)
    if (tower := tower_config(config)) is not None:
        yield from hidden_matrices(tower)


def _token_tables(config: ModelConfig) -> Iterator[HiddenMatrix]:
    """Yield the tables of token embeddings; tied ones occur once."""
    read = [(one.rows, e) for one in config.inputs.values() if (e := one.table_width(config.width)) is not None]
    yield from (HiddenMatrix(1, *table) for table in (read[:1] if config.ties_inputs else read))


def check_model(
    config: ModelConfig,
    at: str = "",
    *,
    training: Optimizer | None = None,
    bytes_per_value: int = 4,
    limit: int | None = None,
) -> None:
    """Refuse a model whose weights do not fit into memory, with both figures.

    `at` is where the config was read from. `training` adds gradients and the state of this optimiser. `limit` is the
    memory in bytes, by default this machine's.
    """
    table = count(config)
    values = 0 if training is None else table.trained + training.state(trained_weights(config))
    needed = bytes_per_value * (table.parameters + values)
    if faults := list(exceeding(needed, f"{table.parameters:,} parameters", limit)):
        raise ConfigError(fault.under(at) for fault in faults)


def exceeding(needed: int, what: str, limit: int | None = None) -> Iterator[Fault]:
    """Yield a fault if `needed` bytes exceed the memory; nothing if its size is unknown."""
    available = usable_memory() if limit is None else limit
    if available is not None and needed > available:
        figures = f"at least {human(needed, 1024, BYTES)} of memory, and there are {human(available, 1024, BYTES)}"
        yield Fault("", f"{what} need {figures}: choose smaller sizes")
