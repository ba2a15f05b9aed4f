"""What each part of a model costs, by its spec: the rules that `count` adds up. Imports no torch."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import assert_never

from anyformer.config import (
    LM,
    Activation,
    Attention,
    Block,
    Classifier,
    Embedder,
    FactorisedTable,
    FullTable,
    Gated,
    Gelu,
    HeadTransform,
    LayerNorm,
    LeakyRelu,
    MaskedLM,
    Mixer,
    ModelConfig,
    NoFeedForward,
    NoMixer,
    NoHead,
    NoNorm,
    Norm,
    NoTransform,
    Parallel,
    Plain,
    Projected,
    RMSNorm,
    Side,
    Silu,
    SquaredRelu,
    Stack,
    TokenLabels,
    Tokens,
    hidden_width,
    position_of,
)


@dataclass(frozen=True)
class Cost:
    """Parameters, FLOPs, and how many numbers are kept for the backward pass and in the cache."""

    parameters: int = 0
    flops: int = 0
    kept: int = 0
    cached: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def side_costs(
    config: ModelConfig, side: Side, stack: Stack, b: int, t: int, s: int
) -> Iterator[tuple[str, int, Cost]]:
    """An input and the stack that reads it: t tokens of its own, s of the encoder's."""
    d, layers = config.width, stack.unrolled()
    read, name = (config.source, "source") if side == "encoder" else (config.target, "target")
    assert read is not None
    shared = side == "decoder" and config.tie in ("inputs", "all")
    yield f"{name} embeddings", 1, _embeddings(read, d, b * t, own_table=not shared)
    # with `share` only the first tile has weights of its own
    own = layers[: len(stack.prefix) + len(stack.blocks)] if stack.share else layers
    yield f"{side} positions", 1, Cost(_position_tables(stack, own, d, read.inner_width(d)))

    costs: dict[str, list[Cost]] = {}
    for i, block in enumerate(layers):
        for part, cost in _block(block, d, b, t, s, caching=side == "decoder"):
            costs.setdefault(part, []).append(cost if i < len(own) else replace(cost, parameters=0))
    for part, each in costs.items():
        yield f"{side} {part}", len(each), sum(each, Cost())
    yield f"{side} final norm", 1, _norm(stack.final_norm, d, b * t)
    if "cross-attention" in costs:
        yield "encoder output", 1, Cost(kept=b * s * d)  # what all cross-attention reads


def _embeddings(tokens: Tokens, d: int, rows: int, own_table: bool) -> Cost:
    inner = tokens.inner_width(d)
    table = tokens.rows * tokens.table_width(d) * own_table
    cost = Cost(table + tokens.types * inner) + _norm(tokens.norm, inner, rows)
    match tokens.table:
        case FullTable():
            return cost
        case FactorisedTable(width=e, bias=bias):
            return cost + _linear(e, d, rows, bias)
        case _:
            assert_never(tokens.table)


def _position_tables(stack: Stack, own: tuple[Block, ...], d: int, inner: int) -> int:
    """One set of tables for the embeddings, and one for each scheme and number of heads, or for each layer."""
    mixers = [(i, block.mixer) for i, block in enumerate(own) if isinstance(block.mixer, Attention)]
    within = [(position_of(mixer, stack), mixer.heads, i) for i, mixer in mixers]
    schemes = {(at, heads, i if at.per_layer else None) for at, heads, i in within if not at.embeds()}
    tables = [at.tables(d, heads) for at, heads, _ in schemes]
    if stack.position.embeds():
        tables.append(stack.position.tables(inner, 0))
    return sum(prod(shape) for table in tables for shape in table.values())


def _block(block: Block, d: int, b: int, t: int, s: int, caching: bool) -> Iterator[tuple[str, Cost]]:
    branches = [*_mixer(block.mixer, d, b, t, caching)]
    if block.cross:
        branches.append(("cross-attention", _attention(block.cross, d, b, t, s, caching)))
    if not isinstance(block.feedforward, NoFeedForward):
        branches.append(("feed-forward", _feedforward(block.feedforward, d, b * t)))
    n, place, parallel = len(branches), block.placement, isinstance(block.order, Parallel)
    shared = isinstance(block.order, Parallel) and block.order.shared_norm
    before = (1 if shared else n) if place in ("pre", "sandwich") else 0
    after = {"pre": 0, "post": 1 if parallel else n, "branch": n, "sandwich": n}[place]
    # what parallel branches read is one tensor, unless each has a norm of its own
    alike = parallel and (before < n or isinstance(block.norm, NoNorm))
    for i, (part, cost) in enumerate(branches):
        yield part, cost if i and alike else cost + Cost(kept=b * t * d)
    norm = _norm(block.norm, d, b * t)
    inputs = (min(before, 1) if parallel else before) + after
    yield "norms", Cost((before + after) * norm.parameters, kept=inputs * norm.kept)


def _mixer(mixer: Mixer, d: int, b: int, t: int, caching: bool) -> Iterator[tuple[str, Cost]]:
    match mixer:
        case Attention():
            yield "self-attention", _attention(mixer, d, b, t, t, caching)
        case NoMixer():
            return
        case _:
            assert_never(mixer)


def _attention(a: Attention, d: int, b: int, t: int, s: int, caching: bool) -> Cost:
    h, g = a.heads, a.groups
    k, k_v = a.widths(d)
    keys, values = g * k * (a.projections == "separate"), g * k_v * (a.projections != "shared_qkv")
    cost = _linear(d, h * k, b * t, a.bias) + _linear(d, keys + values, b * s, a.bias)
    if isinstance(a.output, Projected):
        cost += _linear(h * k_v, d, b * t, a.output.bias)
    cost = replace(cost, kept=b * (t * h * (k + k_v) + s * g * (k + k_v)))  # q and what the heads read; k and v
    cost += _norm(a.qk_norm, k, b * t * h) + _norm(a.qk_norm, k, b * s * g)
    return cost + Cost(flops=2 * b * h * t * s * (k + k_v), cached=b * s * g * (k + k_v) * caching)


def _feedforward(spec: Plain | Gated, d: int, rows: int) -> Cost:
    f = hidden_width(spec, d)
    gated = isinstance(spec, Gated)
    cost = _linear(d, f * (1 + gated), rows, spec.bias) + _linear(f, d, rows, spec.bias)
    return replace(cost, kept=rows * f * ((3 if gated else 1) + _blind(spec.activation)))


def _blind(activation: Activation) -> bool:
    """Whether the backward pass needs more than the activation's output."""
    return isinstance(activation, (Gelu, Silu, LeakyRelu, SquaredRelu))


def head_cost(config: ModelConfig, b: int, t: int) -> Cost:
    d, head, last = config.width, config.head, config.last_input
    e, v, own_table = last.table_width(d), last.rows, config.tie not in ("output", "all")
    match head:
        case NoHead():
            return Cost()
        case LM() | MaskedLM():
            transform = head.transform if isinstance(head, MaskedLM) else NoTransform()
            table = Cost((e * own_table + head.bias) * v, 2 * b * t * e * v, kept=b * t * (e + v))
            return _transform(transform, d, e, b * t) + table
        case TokenLabels(labels=labels):
            return _linear(d, labels, b * t, True) + Cost(kept=b * t * labels)
        case Classifier(labels=labels):
            return _transform(head.transform, d, d, b) + _linear(d, labels, b, True) + Cost(kept=b * labels)
        case Embedder():
            return _transform(head.transform, d, d, b) + Cost(kept=b * d)
        case _:
            assert_never(head)


def _transform(spec: HeadTransform, d: int, to: int, rows: int) -> Cost:
    if isinstance(spec, NoTransform):
        return Cost() if to == d else _linear(d, to, rows, bias=False)
    blind = Cost(kept=rows * to * _blind(spec.activation))
    return _linear(d, to, rows, spec.bias) + blind + _norm(spec.norm, to, rows)


def _linear(inputs: int, outputs: int, rows: int, bias: bool) -> Cost:
    return Cost((inputs + bias) * outputs, 2 * rows * inputs * outputs, kept=rows * inputs)


def _norm(spec: Norm, width: int, rows: int) -> Cost:
    match spec:
        case NoNorm():
            return Cost()
        case LayerNorm(bias=bias):
            return Cost(width * (1 + bias), kept=rows * width)
        case RMSNorm():
            return Cost(width, kept=rows * width)
        case _:
            assert_never(spec)
