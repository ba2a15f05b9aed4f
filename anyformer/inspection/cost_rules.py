"""Cost of each part of a model by its spec: the rules that `count` adds up. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import assert_never

from anyformer.config import (
    LM,
    Attention,
    Audio,
    Block,
    ByteSpelling,
    Classifier,
    Embedder,
    FactorisedTable,
    Features,
    FullTable,
    HeadTransform,
    Input,
    Layers,
    LoRA,
    MaskedLM,
    ModelConfig,
    NoFeedForward,
    NoHead,
    NoMixer,
    NoNorm,
    NoPosition,
    NoSpelling,
    NoTransform,
    Parallel,
    Patches,
    Position,
    Side,
    SpanBounds,
    Spelling,
    Stack,
    TokenLabels,
    Tokens,
    Transform,
    encoder_init_layers,
    label_count,
    pattern_across,
    position_of,
)
from anyformer.config.adapter import matrices, within
from anyformer.config.cost import Cost, linear
from anyformer.inspection.media_cost import audio_cost, media_cost

ADAPTERS = "adapters"


def side_costs(
    config: ModelConfig, side: Side, stack: Stack, b: int, t: int, s: int
) -> Iterator[tuple[str, int, Cost]]:
    """Yield (part, layers, cost) of an input and its stack: t tokens on this side, s on the encoder's."""
    d, layers = config.width, stack.distinct()
    read, name = (config.source, "source") if side == "encoder" else (config.target, "target")
    assert read is not None
    shared = side == "decoder" and config.tie in ("inputs", "all")
    inner = read.inner_width(d) if isinstance(read, Tokens) else d
    yield f"{name} embeddings", 1, _input(read, d, b, t, own_table=not shared)
    yield f"{side} positions", 1, Cost(_position_module(stack, layers, d, inner))

    costs: dict[str, tuple[int, Cost]] = {}
    for group in layers:
        tokens = pooled(t, stack, group.level)
        for part, cost in block_costs(group.block.on(side, stack.position), d, b, tokens, s, side):
            count, total = costs.get(part, (0, Cost()))
            costs[part] = count + group.times, total + cost.times(group.times, group.own)
    if config.adapter:
        costs[ADAPTERS] = stack.depth, _adapters(config.adapter, side, stack, d, b, t, s)
    for part, (count, total) in costs.items():
        yield f"{side} {part}", count, total
    yield f"{side} final norm", 1, stack.final_norm.cost(d, b * t)
    if skips := 2 * stack.depth * stack.embedding_skip + stack.depth // 2 * stack.unet_skips:
        # outputs of layers before they are mixed with the embedding
        yield f"{side} skip connections", 1, Cost(skips, saved=b * t * d * (stack.depth - 1) * stack.embedding_skip)
    if side == "decoder" and (states := sum(mixer.state(d) for mixer in encoder_init_layers(config).values())):
        yield "encoder states", 1, Cost(cached=b * s * states)
    if "cross-attention" in costs:
        yield "encoder output", 1, Cost(saved=b * s * d)  # the shared input of all cross-attention


def pooled(length: int, stack: Stack, level: int) -> int:
    """Return how many of `length` tokens remain after pooling `level` times."""
    return -(-length // stack.pooling.factor**level) if stack.pooling else length


def _adapters(adapter: LoRA, side: Side, stack: Stack, d: int, b: int, t: int, s: int) -> Cost:
    """Return the cost of a stack's adapters, layer by layer, since targets name layers by number."""
    total = Cost()
    layers = zip(stack.runs, stack.unrolled(), stack.levels, strict=True)
    for i, (run, block, level) in enumerate(layers):
        rows, at = b * pooled(t, stack, level), f"{side}.blocks.{run}"
        cost = adapter_cost(adapter, at, block.on(side, stack.position), d, rows, b * s)
        total += cost.times(1, own=run == i)
    return total


def adapter_cost(adapter: LoRA, at: str, block: Block, d: int, rows: int, source_rows: int) -> Cost:
    """Return the cost of a block's adapters; the inputs of the linear layers are counted as saved already."""
    cost, r = Cost(), adapter.rank
    for name, inputs, outputs, across, fixed, _ in matrices(block, d, NoPosition()):
        if any(within(f"{at}.{name}", target) for target in adapter.targets):
            read = fixed or (source_rows if across else rows)
            cost += Cost(r * (inputs + outputs), 2 * read * r * (inputs + outputs), saved=read * r)
    return cost


def _input(read: Input, d: int, b: int, t: int, own_table: bool) -> Cost:
    match read:
        case Tokens():
            return _embeddings(read, d, b * t, own_table) + media_cost(read.media, read.inner_width(d), b)
        case Features(size=size, bias=bias):
            return linear(size, d, b * t, bias) + read.norm.cost(d, b * t)
        case Audio():
            return audio_cost(read, d, b * t) + read.norm.cost(d, b * t)
        case Patches(size=size, bias=bias):
            first = int(read.class_token)
            return linear(size, d, b * (t - first), bias) + Cost(d * first) + read.norm.cost(d, b * t)
        case _:
            assert_never(read)


def _embeddings(tokens: Tokens, d: int, rows: int, own_table: bool) -> Cost:
    inner = tokens.inner_width(d)
    table = tokens.rows * tokens.table_width(d) * own_table
    cost = Cost(table + tokens.types * inner) + tokens.norm.cost(inner, rows)
    cost += _spelling(tokens.spelling, inner, rows)
    match tokens.table:
        case FullTable():
            return cost
        case FactorisedTable(width=e, bias=bias):
            return cost + linear(e, d, rows, bias)
        case _:
            assert_never(tokens.table)


def _spelling(spec: Spelling, inner: int, rows: int) -> Cost:
    match spec:
        case NoSpelling():
            return Cost()
        case ByteSpelling(width=w, channels=c, kernel=k, longest=n):
            extra = Cost(saved=rows * (n * c + (k - 1) * w))  # channels of each byte, and the padding of the word
            convolution = replace(linear(k * w, c, rows * n, True), saved=rows * n * w)
            return Cost(257 * w) + convolution + extra + linear(c, inner, rows, False)
        case _:
            assert_never(spec)


def _position_module(stack: Stack, layers: list[Layers], d: int, inner: int) -> int:
    """Count position tables: one set for the embeddings, one per scheme and number of heads, or one per layer."""
    tables: dict[tuple[Position, int], int] = {}  # how many of each scheme and number of heads
    for group in layers:
        if isinstance(mixer := group.block.mixer, Attention) and not (at := position_of(mixer, stack)).embeds():
            key = at, mixer.heads
            tables[key] = tables.get(key, 0) + group.own if at.per_layer else 1
    total = sum(count * _elements(at.tables(d, heads)) for (at, heads), count in tables.items())
    return total + (_elements(stack.position.tables(inner, 0)) if stack.position.embeds() else 0)


def _elements(tables: dict[str, tuple[int, ...]]) -> int:
    return sum(map(prod, tables.values()))


def block_costs(block: Block, d: int, b: int, t: int, s: int, side: Side) -> Iterator[tuple[str, Cost]]:
    """Yield the cost of each sublayer of a block (see `Block.on`) in order, and of its norms."""
    branches = [] if isinstance(block.mixer, NoMixer) else [(block.mixer.part, block.mixer.cost(d, b, t, side))]
    if cross := block.cross:
        cost = cross.cost_between(pattern_across(cross), d, b, t, s, side, across=True)
        branches.append(("cross-attention", cost))
    if not isinstance(block.feedforward, NoFeedForward):
        branches.append(("feed-forward", block.feedforward.cost(d, b * t)))
    n, place, parallel = len(branches), block.placement, isinstance(block.order, Parallel)
    shared = isinstance(block.order, Parallel) and block.order.shared_norm
    before = (1 if shared else n) if place in ("pre", "sandwich") else 0
    after = {"pre": 0, "post": 1 if parallel else n, "branch": n, "sandwich": n}[place]
    # parallel branches share one input tensor, unless each has its own norm
    shared_input = parallel and (before < n or isinstance(block.norm, NoNorm))
    for i, (part, cost) in enumerate(branches):
        yield part, cost if i and shared_input else cost + Cost(saved=b * t * d)
    norm = block.norm.cost(d, b * t)
    inputs = (min(before, 1) if parallel else before) + after
    yield "norms", Cost((before + after) * norm.parameters, saved=inputs * norm.saved)


def head_cost(config: ModelConfig, b: int, t: int) -> Cost:
    d, head, read = config.width, config.head, config.last_input
    match head:
        case NoHead():
            return Cost()
        case LM() | MaskedLM():
            assert isinstance(read, Tokens)
            e, v, own_table = read.table_width(d), read.rows, config.tie not in ("output", "all")
            transform = head.transform if isinstance(head, MaskedLM) else NoTransform()
            table = Cost((e * own_table + head.bias) * v, 2 * b * t * e * v, saved=b * t * (e + v))
            more = head.multi_token.tokens if isinstance(head, LM) and head.multi_token else 0
            further = Cost(more * d * d, more * 2 * b * t * (d * d + e * v), saved=more * b * t * (2 * d + e + v))
            return _transform(transform, d, e, b * t) + table + further
        case TokenLabels(crf=crf):
            labels = label_count(head)
            rows = labels + 1 if crf else 1  # of scores per token
            logits = linear(d, labels, b * t, True) + Cost(crf * rows * labels, saved=b * t * rows * labels)
            return _transform(head.transform, d, d, b * t) + logits
        case SpanBounds():
            return _transform(head.transform, d, d, b * t) + linear(d, 2, b * t, True) + Cost(saved=b * t * 2)
        case Classifier():
            labels = label_count(head)
            return _transform(head.transform, d, d, b) + linear(d, labels, b, head.bias) + Cost(saved=b * labels)
        case Embedder(projection=projection):
            found, inputs = _transform(head.transform, d, d, b) + Cost(int(head.learned_scale)), d
            for layer in head.layers:
                found += _transform(Transform(activation=layer.activation, bias=layer.bias), inputs, layer.width, b)
                inputs = layer.width
            project = linear(inputs, projection, b, bias=False) if projection else Cost()
            return found + project + Cost(saved=b * head.vector_width(d))
        case _:
            assert_never(head)


def _transform(spec: HeadTransform, d: int, to: int, rows: int) -> Cost:
    if isinstance(spec, NoTransform):
        return Cost() if to == d else linear(d, to, rows, bias=False)
    activation = Cost(saved=rows * to * spec.activation.saves_input)
    return linear(d, to, rows, spec.bias) + activation + spec.norm.cost(to, rows)
