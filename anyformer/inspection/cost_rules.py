"""Cost of each part of a model by its spec: the rules that `count` adds up. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import assert_never

import numpy as np

from anyformer.config import (
    LM,
    Activation,
    Attention,
    Audio,
    Block,
    ByteSpelling,
    Classifier,
    ConfigError,
    Convolution,
    Disentangled,
    Embedder,
    Experts,
    FactorisedTable,
    Fault,
    Features,
    FullTable,
    FullyConnected,
    Gated,
    GatedDelta,
    Gelu,
    HeadTransform,
    Input,
    Latent,
    Layers,
    LeakyRelu,
    LinearAttention,
    LoRA,
    Mamba2,
    MaskedLM,
    Mixer,
    ModelConfig,
    Network,
    NoCompression,
    NoFeedForward,
    NoHead,
    NoMixer,
    NoNorm,
    NoPosition,
    NoSpelling,
    NoTransform,
    Parallel,
    Patches,
    Pattern,
    Position,
    PositionMixing,
    Projected,
    QuickGelu,
    Recurrent,
    Side,
    Silu,
    SoftmaxTopK,
    Span,
    SpanBounds,
    Spelling,
    SquaredRelu,
    Stack,
    TokenLabels,
    Tokens,
    Transform,
    encoder_init_layers,
    hidden_width,
    label_count,
    pattern_across,
    pattern_of,
    position_of,
    with_position,
)
from anyformer.config.adapter import matrices, within
from anyformer.inspection.cost import Cost, linear, norm_cost
from anyformer.inspection.distance_cost import distance_cost
from anyformer.inspection.media_cost import audio_cost, media_cost
from anyformer.inspection.state_costs import state_mixer_cost

ADAPTERS = "adapters"
PARTS = {"linear_attention": "linear attention", "gated_delta": "gated delta rule", "mamba2": "Mamba-2"}
MAX_BLOCKS = 16_384  # along one side of a sparse pattern: counting them takes about a second


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
        for part, cost in block_costs(with_position(group.block, stack), d, b, tokens, s, caching=side == "decoder"):
            count, total = costs.get(part, (0, Cost()))
            costs[part] = count + group.times, total + cost.times(group.times, group.own)
    if config.adapter:
        costs[ADAPTERS] = stack.depth, _adapters(config.adapter, side, stack, d, b, t, s)
    for part, (count, total) in costs.items():
        yield f"{side} {part}", count, total
    yield f"{side} final norm", 1, norm_cost(stack.final_norm, d, b * t)
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
        cost = adapter_cost(adapter, at, with_position(block, stack), d, rows, b * s)
        total += cost.times(1, own=run == i)
    return total


def adapter_cost(adapter: LoRA, at: str, block: Block, d: int, rows: int, source_rows: int) -> Cost:
    """Return the cost of a block's adapters; the inputs of the linear layers are counted as saved already."""
    cost, r = Cost(), adapter.rank
    for name, inputs, outputs, across, fixed in matrices(block, d, NoPosition()):
        if any(within(f"{at}.{name}", target) for target in adapter.targets):
            read = fixed or (source_rows if across else rows)
            cost += Cost(r * (inputs + outputs), 2 * read * r * (inputs + outputs), saved=read * r)
    return cost


def _input(read: Input, d: int, b: int, t: int, own_table: bool) -> Cost:
    match read:
        case Tokens():
            return _embeddings(read, d, b * t, own_table) + media_cost(read.media, read.inner_width(d), b)
        case Features(size=size, bias=bias):
            return linear(size, d, b * t, bias) + norm_cost(read.norm, d, b * t)
        case Audio():
            return audio_cost(read, d, b * t) + norm_cost(read.norm, d, b * t)
        case Patches(size=size, bias=bias):
            first = int(read.class_token)
            return linear(size, d, b * (t - first), bias) + Cost(d * first) + norm_cost(read.norm, d, b * t)
        case _:
            assert_never(read)


def _embeddings(tokens: Tokens, d: int, rows: int, own_table: bool) -> Cost:
    inner = tokens.inner_width(d)
    table = tokens.rows * tokens.table_width(d) * own_table
    cost = Cost(table + tokens.types * inner) + norm_cost(tokens.norm, inner, rows)
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


def block_costs(block: Block, d: int, b: int, t: int, s: int, caching: bool) -> Iterator[tuple[str, Cost]]:
    """Yield the cost of each sublayer of a block (see `with_position`) in order, and of its norms."""
    branches = [*_mixer(block.mixer, d, b, t, caching)]
    if block.cross:
        branches.append(("cross-attention", _attention(block.cross, pattern_across(block.cross), d, b, t, s, caching)))
    if not isinstance(block.feedforward, NoFeedForward):
        branches.append(("feed-forward", _feedforward(block.feedforward, d, b * t)))
    n, place, parallel = len(branches), block.placement, isinstance(block.order, Parallel)
    shared = isinstance(block.order, Parallel) and block.order.shared_norm
    before = (1 if shared else n) if place in ("pre", "sandwich") else 0
    after = {"pre": 0, "post": 1 if parallel else n, "branch": n, "sandwich": n}[place]
    # parallel branches share one input tensor, unless each has its own norm
    shared_input = parallel and (before < n or isinstance(block.norm, NoNorm))
    for i, (part, cost) in enumerate(branches):
        yield part, cost if i and shared_input else cost + Cost(saved=b * t * d)
    norm = norm_cost(block.norm, d, b * t)
    inputs = (min(before, 1) if parallel else before) + after
    yield "norms", Cost((before + after) * norm.parameters, saved=inputs * norm.saved)


def _mixer(mixer: Mixer, d: int, b: int, t: int, caching: bool) -> Iterator[tuple[str, Cost]]:
    match mixer:
        case Attention():
            pattern = pattern_of(mixer, "decoder" if caching else "encoder")
            yield "self-attention", _attention(mixer, pattern, d, b, t, t, caching)
        case LinearAttention() | GatedDelta() | Mamba2():
            yield PARTS[mixer.kind], state_mixer_cost(mixer, d, b, t, caching)
        case Recurrent():
            yield "recurrence", _recurrence(mixer, d, b, t, caching)
        case Convolution(width=k, bias=bias):
            slots = _slots(t, mixer.before(causal=True))
            yield "convolution", replace(linear(k * d, d, b * t, bias), saved=0, cached=b * slots * d * caching)
        case FullyConnected(length=n, bias=bias):
            yield "dense", Cost(n * d * (n * d + bias), 2 * b * (t * d) ** 2, cached=b * t * d * caching)
        case PositionMixing(length=n, bias=bias):
            yield "positions", Cost(n * (n + bias), 2 * b * t * t * d, cached=b * t * d * caching)
        case NoMixer():
            return
        case _:
            assert_never(mixer)


def _attention(a: Attention, pattern: Pattern, d: int, b: int, t: int, s: int, caching: bool) -> Cost:
    h, g = a.heads, a.groups
    k, k_v = a.widths(d)
    cost, each = _projections(a, d, b * t, b * s)
    if isinstance(a.output, Projected):
        cost += replace(linear(h * k_v, d, b * t, a.output.bias), saved=0)
    cost += Cost(saved=b * (t * h * (k + k_v) + s * g * (k + k_v)))  # q and the heads' outputs; k and v
    cost += Cost(h * a.sinks)
    if isinstance(a.position, Disentangled):
        cost += distance_cost(a, a.position, d, b, t)
    wide, wide_v = a.kernel_widths(d)
    if a.global_projections:
        own = linear(d, h * k + g * (k + k_v), b * t, a.bias)
        more = b * t * (h + g) * (wide - k + wide_v - k_v)
        cost += replace(own, flops=own.flops if wide > k else 0, saved=more)
    if gates := a.gate_size(d):
        cost += replace(linear(d, gates, b * t, bias=False), saved=b * t * (gates + h * k_v))  # and the gated heads
    if a.value_residual:
        cost += Cost(2, saved=b * t * g * k_v)  # values before they are mixed
    return cost + Cost(
        flops=2 * b * h * pairs(pattern, t, s) * (wide + wide_v), cached=b * _slots(s, a.reach) * each * caching
    )


@cache  # many layers have the same pattern
def pairs(pattern: Pattern, t: int, s: int) -> int:
    """Return the number of (query, key) pairs multiplied; of a sparse pattern, those in blocks with a visible pair."""
    if not pattern.sparse:
        return t * s
    if max(t, s) > MAX_BLOCKS * pattern.tile:
        what = f"= {max(t, s):,}: the blocks of the pattern {pattern.kind} are counted one by one,"
        raise ConfigError([Fault("length", f"{what} for at most {MAX_BLOCKS * pattern.tile:,} tokens")])
    rows, columns = _blocks(t, pattern.tile), _blocks(s, pattern.tile)
    wide, total = columns.high - columns.low + 1, 0
    for some in np.array_split(np.arange(len(rows.low)), 1 + len(rows.low) // 64):  # 64 rows at a time bound memory
        low, high = rows.low[some, None], rows.high[some, None]
        met = np.asarray(pattern.meets(Span(low, high), columns))
        total += int(((high - low + 1) * (met @ wide)[:, None]).sum())
    return total


def _blocks(length: int, size: int) -> Span:
    """Return the first and the last position of each block of tokens."""
    low = np.arange(0, length, size)
    return Span(low, np.minimum(low + size - 1, length - 1))


def _projections(a: Attention, d: int, queries: int, keys: int) -> tuple[Cost, int]:
    """Return the cost of projecting tokens to q, k and v, and the number of cached values per token."""
    h, g = a.heads, a.groups
    k, k_v = a.widths(d)
    match a.compress:
        case NoCompression():
            both = g * k * (a.projections == "separate") + g * k_v * (a.projections != "shared_qkv")
            cost = linear(d, h * k, queries, a.bias) + linear(d, both, keys, a.bias)
            if a.qk_norm_over == "head":
                norms = norm_cost(a.qk_norm, k, queries * h) + norm_cost(a.qk_norm, k, keys * g)
            else:
                norms = norm_cost(a.qk_norm, h * k, queries) + norm_cost(a.qk_norm, g * k, keys)
            return replace(cost, saved=0) + norms, g * (k + k_v)
        case Latent(rank=r, rotary_width=rotary, query_rank=rank, norm=norm):
            cost = replace(linear(d, (rank or h * k) + r + rotary, queries, a.bias), saved=0)
            cost += norm_cost(norm, r, queries) + linear(r, h * (k - rotary + k_v), queries, bias=False)
            if rank:
                cost += norm_cost(norm, rank, queries) + linear(rank, h * k, queries, bias=False)
            return cost, r + rotary
        case _:
            assert_never(a.compress)


def _slots(length: int, reach: int | None) -> int:
    """Return the cache slots of a layer that sees `reach` tokens back: these, the newest, and one slot for padding."""
    return length if reach is None else min(length, reach + 2)


def _recurrence(spec: Recurrent, d: int, b: int, t: int, caching: bool) -> Cost:
    h, directions = spec.hidden(d), 2 if spec.both_ways else 1
    gates, saved = {"rnn": (1, 1), "lstm": (4, 7), "gru": (3, 5)}[spec.cell]  # saved: gates, their factors, states
    cost = Cost(directions * gates * h * (d + h + 2), directions * 2 * b * t * gates * h * (d + h))
    if directions > 1 or h != d:
        cost += linear(directions * h, d, b * t, bias=False)
    return replace(cost, saved=b * t * directions * saved * h, cached=b * t * spec.state(d) * caching)


def _feedforward(spec: Network | Experts, d: int, rows: int) -> Cost:
    if not isinstance(spec, Experts):
        return _network(spec, d, hidden_width(spec, d), rows)
    n, k, f = spec.count, spec.top_k, hidden_width(spec.expert, d)
    bias = isinstance(spec.router, SoftmaxTopK) and spec.router.bias
    cost = replace(linear(d, n, rows, bias), saved=rows * n)  # probabilities
    chosen = _network(spec.expert, d, f, rows * k)
    cost += replace(chosen, parameters=n * chosen.parameters) + Cost(saved=2 * rows * k * d)  # inputs and outputs
    if spec.shared_gate:
        cost += linear(d, 1, rows, bias=False)
    return cost + _network(spec.expert, d, spec.shared * f, rows) if spec.shared else cost


def _network(spec: Network, d: int, f: int, rows: int) -> Cost:
    gated = isinstance(spec, Gated)
    cost = linear(d, f * (1 + gated), rows, spec.bias) + linear(f, d, rows, spec.bias)
    return replace(cost, saved=rows * f * ((3 if gated else 1) + _saves_input(spec.activation)))


def _saves_input(activation: Activation) -> bool:
    """Return whether the backward pass needs the activation's input, not only its output."""
    return isinstance(activation, (Gelu, QuickGelu, Silu, LeakyRelu, SquaredRelu))


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
    activation = Cost(saved=rows * to * _saves_input(spec.activation))
    return linear(d, to, rows, spec.bias) + activation + norm_cost(spec.norm, to, rows)
