"""How much memory a training step takes at its peak, from the config alone. Imports no torch.

    weights       in fp32, and what AdamW knows of each: two more numbers
    casts         copies of the weights in half precision, which the backward pass reads
    activations   what is kept for the backward pass: as `count` has it, and what it leaves out: the residual stream is
                  fp32 in any precision, so norms keep that unless compiled; masks of dropout, a byte a number; the sums
                  of attention; a projection that stays because its values are read from it after its queries and keys
                  were turned
    passing       the most that comes and goes while all of that is there: the logits of the loss, or the gradients
                  within a layer; with `recompute` also the activations of one layer
    gradients     of all weights, when the first layer is done and all activations are gone

The peak is at the loss or the backward pass of the last layer, or where the weights are many and the tokens are few, at
the end of the backward pass. Left out: biases on scores between all tokens, weights of attention where no kernel spares
them (ReLU in place of softmax), and libraries' workspaces, some 50 MB on a GPU.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from anyformer.config import (
    LM,
    Attention,
    Block,
    Experts,
    Gated,
    LayerNorm,
    MaskedLM,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    Norm,
    Relu,
    RMSNorm,
    Rotary,
    Side,
    Stack,
    Tokens,
    hidden_width,
    position_of,
)
from anyformer.inspection.cost_rules import block_costs, head_cost, pooled, side_costs
from anyformer.inspection.count import BYTES, count, human

Precision = Literal["fp32", "bf16"]
FP32, MASK = 4, 1  # bytes
LOGITS = 2**33  # bytes of logits that the loss makes at a time in half precision
MASKED = 0.15  # of the tokens, whose words a masked LM is asked


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: int
    optimizer: int
    casts: int
    activations: int
    passing: int
    gradients: int
    peak: int
    precision: Precision
    compiled: bool
    recompute: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("weights", "optimizer", "casts", "activations", "passing")}
        end = "" if self.peak == sum(parts.values()) else ", at the end with all gradients"
        how = [self.precision, "compiled" if self.compiled else "eager", *(["recomputed"] if self.recompute else [])]
        told = ", ".join(f"{name} {human(n, 1024, BYTES)}" for name, n in parts.items() if n)
        return f"training ({', '.join(how)}): {human(self.peak, 1024, BYTES)} at the peak{end}: {told}"


class _How(NamedTuple):
    size: int  # bytes of an activation
    compiled: bool


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
) -> Memory:
    """The peak of a step with AdamW on a GPU, of `batch` rows of `length` tokens (as `count` takes them).

    Weights are fp32; with `precision` "bf16" products are not. `recompute`: `train.checkpoint_activations`. `asked` is
    the share of tokens whose word the loss asks for: of a masked LM 15 %, else all.
    """
    table = count(config, length, batch=batch, source_length=source_length)
    how = _How(2 if precision == "bf16" else FP32, compiled)
    lengths: dict[Side, int] = {"encoder": table.source_length or table.length, "decoder": table.length}
    last = list(config.stacks)[-1]
    sides = [_Kept.of(config, side, stack, batch, lengths[side], lengths["encoder"], how)
             for side, stack in config.stacks.items()]  # fmt: skip
    rows = batch * lengths[last]
    asked = (MASKED if isinstance(config.head, MaskedLM) else 1.0) if asked is None else asked
    head = _Head.of(config, rows, int(rows * asked), how)
    layers = [layer for side in sides for layer in side.layers]
    inputs = sum(side.inputs for side in sides)
    activations = (
        sum(side.outside for side in sides)
        + head.kept
        + (inputs if recompute else sum(n * count for n, count in layers))
    )
    within = max(_within(block, config.width, batch, lengths[side], how) for side, block in _blocks(config))
    passing = max(head.passing, head.after + within + recompute * max(n for n, _ in layers))
    weights, few = FP32 * table.parameters, FP32 * table.trained
    casts = 0 if precision == "fp32" else how.size * _cast(config, batch, lengths, table.parameters)
    fixed = weights + 2 * few
    first = sides[0].outside + layers[0][0]
    peak = max(fixed + casts + activations + passing, fixed + few + head.twice + within + first)
    return Memory(weights, 2 * few, casts, activations, passing, few, peak, precision, compiled, recompute)


def _blocks(config: ModelConfig) -> Iterator[tuple[Side, Block]]:
    for side, stack in config.stacks.items():
        for block in {*stack.prefix, *stack.blocks}:
            yield side, block


def _cast(config: ModelConfig, b: int, lengths: dict[Side, int], parameters: int) -> int:
    """Weights that are multiplied: all but the tables that tokens are looked up in."""
    looked_up = sum(
        cost.parameters
        for side, stack in config.stacks.items()
        for part, _, cost in side_costs(config, side, stack, b, lengths[side], lengths["encoder"])
        if part.endswith(("embeddings", "positions"))
    )
    return parameters - looked_up


class _Kept(NamedTuple):
    """Bytes of a side that are kept."""

    layers: tuple[tuple[int, int], ...]  # of one layer, and how many are like it
    inputs: int  # of the layers: all that is kept where they are recomputed
    outside: int  # of the layers

    @classmethod
    def of(cls, config: ModelConfig, side: Side, stack: Stack, b: int, t: int, s: int, how: _How) -> "_Kept":
        d, layers, inputs = config.width, list[tuple[int, int]](), 0
        for group in stack.distinct():
            tokens = pooled(t, stack, group.level)
            layers.append((_block(group.block, stack, d, b, tokens, s, side == "decoder", how), group.times))
            inputs += b * tokens * d * FP32 * group.times
        read = config.source if side == "encoder" else config.target
        assert read is not None
        outside = b * t * d * MASK * ((read.dropout > 0) + (stack.dropout > 0))
        names = f"{'source' if side == 'encoder' else 'target'} embeddings", f"{side} final norm"
        for part, _, cost in side_costs(config, side, stack, b, t, s):
            if part in names:  # nearly all of it in norms
                outside += cost.kept * _normed(stack.final_norm, how) * _times(stack.final_norm, how)
            elif part == "encoder output":
                outside += cost.kept * how.size
        return cls(tuple(layers), inputs, outside)


def _block(block: Block, stack: Stack, d: int, b: int, t: int, s: int, caching: bool, how: _How) -> int:
    """What a layer keeps."""
    rows, size = b * t, how.size
    costs = dict(block_costs(block, d, b, t, s, caching))
    norms = costs.pop("norms").kept
    branches = len(costs)
    kept = size * sum(cost.kept for cost in costs.values())
    stream = {"pre": 1.0, "post": 1.0, "branch": 0.0, "sandwich": 0.5}[block.placement]  # norms that read it
    kept += int(norms * (size + stream * (_normed(block.norm, how) - size)))
    kept += norms * FP32 * (_times(block.norm, how) - 1)
    kept += rows * d * MASK * branches * (block.dropout > 0)
    for a, keys in ((block.mixer, t), (block.cross, s)):
        if isinstance(a, Attention):
            kept += FP32 * rows * a.heads
            turned = a is block.mixer and isinstance(position_of(a, stack), Rotary)
            if turned and isinstance(a.qk_norm, NoNorm):
                kept += size * b * (t * a.heads + keys * a.groups) * a.widths(d)[0]
    spec = block.feedforward
    if not isinstance(spec, (Experts, NoFeedForward)):
        f = rows * hidden_width(spec, d)
        kept += f * MASK * (spec.dropout > 0)
        if how.compiled and isinstance(spec, Gated):
            kept -= f * size  # the gate after its activation is made anew
        elif how.compiled and isinstance(spec.activation, Relu) and (size == FP32 or not spec.bias or spec.dropout):
            kept += f * MASK  # where it was positive, unless that is told by what it made
    return kept


def _normed(norm: Norm, how: _How) -> int:
    """Bytes of a number of the residual stream that a norm keeps."""
    return how.size if how.compiled and isinstance(norm, (LayerNorm, RMSNorm)) else FP32


def _times(norm: Norm, how: _How) -> int:
    """What a norm keeps beside its input, in as many numbers: unless compiled, what its weight multiplies."""
    return 2 if isinstance(norm, RMSNorm) and not how.compiled else 1


def _within(block: Block, d: int, b: int, t: int, how: _How) -> int:
    """Gradients that are there at once while those of a layer are found."""
    spec, rows = block.feedforward, b * t
    one = spec.expert if isinstance(spec, Experts) else spec
    f = 0 if isinstance(one, NoFeedForward) else hidden_width(one, d) * (1 + isinstance(one, Gated))
    f *= spec.top_k if isinstance(spec, Experts) else 1
    return rows * (2 * max(f, 4 * d) * how.size + 2 * d * FP32)


class _Head(NamedTuple):
    """Bytes of a head and its loss."""

    kept: int
    passing: int  # while the loss is found
    after: int  # of gradients, when the last layer's begin
    twice: int  # a table that is read at both ends has two gradients until they are added

    @classmethod
    def of(cls, config: ModelConfig, rows: int, asked: int, how: _How) -> "_Head":
        head, read = config.head, config.last_input
        if not isinstance(head, (LM, MaskedLM)):
            cost = head_cost(config, 1, rows)  # of rows that are pooled less, and little either way
            return cls(cost.kept * how.size, 0, FP32 * cost.parameters, 0)
        assert isinstance(read, Tokens)
        e, v = read.table_width(config.width), read.rows
        tied = config.tie in ("output", "all")
        padded = tied and read.pad is not None  # a copy of the table, of whose row nothing is learned
        kept = how.size * (head_cost(config, 1, asked).kept - asked * v)
        table, logits = e * v, asked * v
        after, twice = FP32 * table, FP32 * table * tied
        if how.size == FP32:
            kept += FP32 * table * padded
            return cls(kept + logits * FP32, logits * FP32 * (1 if how.compiled else 2), after, twice)
        if isinstance(head, LM) and head.cap is not None:
            return cls(kept + logits * 6, logits * (6 if how.compiled else 10), after, twice)
        parts = max(1, -(-logits * how.size // LOGITS))
        slopes = table * (how.size if parts == 1 else parts * (how.size + FP32))
        copies = table * how.size * tied + asked * e * how.size + table * FP32 * (padded and not how.compiled)
        return cls(kept, -(-logits // parts) * how.size + slopes + copies, after, twice)
