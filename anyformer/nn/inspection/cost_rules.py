"""Cost of each part of a model by its spec: the rules that `count` adds up. Imports no torch."""

from collections.abc import Iterator
from math import prod

from anyformer.config import (
    Block,
    Layers,
    LoRA,
    ModelConfig,
    Position,
    Side,
    Stack,
    encoder_init_layers,
    pattern_across,
    position_of,
)
from anyformer.config.adapter import matrices, within
from anyformer.config.cost import Cost

ADAPTERS = "adapters"


def side_costs(
    config: ModelConfig, side: Side, stack: Stack, b: int, t: int, s: int
) -> Iterator[tuple[str, int, Cost]]:
    """Yield (part, layers, cost) of an input and its stack: t tokens on this side, s on the encoder's."""
    d, layers = config.width, stack.distinct()
    read, name = (config.source, "source") if side == "encoder" else (config.target, "target")
    assert read is not None
    shared = side == "decoder" and config.ties_inputs
    yield f"{name} embeddings", 1, read.cost(d, b, t, own_table=not shared)
    yield f"{side} positions", 1, Cost(_position_module(stack, layers, d, read.inner_width(d)))

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
    for name, inputs, outputs, across, fixed, _ in matrices(block, d, Position.none()):
        if any(within(f"{at}.{name}", target) for target in adapter.targets):
            read = fixed or (source_rows if across else rows)
            cost += Cost(r * (inputs + outputs), 2 * read * r * (inputs + outputs), saved=read * r)
    return cost


def _position_module(stack: Stack, layers: list[Layers], d: int, inner: int) -> int:
    """Count position tables: one set for the embeddings, one per scheme and number of heads, or one per layer."""
    tables: dict[tuple[Position, int], int] = {}  # how many of each scheme and number of heads
    for group in layers:
        if (mixer := group.block.attention) and not (at := position_of(mixer, stack)).embeds():
            key = at, mixer.heads
            tables[key] = tables.get(key, 0) + group.own if at.per_layer else 1
    total = sum(count * _elements(at.tables(d, heads)) for (at, heads), count in tables.items())
    return total + (_elements(stack.position.tables(inner, 0)) if stack.position.embeds() else 0)


def _elements(tables: dict[str, tuple[int, ...]]) -> int:
    return sum(map(prod, tables.values()))


def block_costs(block: Block, d: int, b: int, t: int, s: int, side: Side) -> Iterator[tuple[str, Cost]]:
    """Yield the cost of each sublayer of a block (see `Block.on`) in order, and of its norms."""
    branches = [] if block.mixer.is_none else [(block.mixer.part, block.mixer.cost(d, b, t, side))]
    if cross := block.cross:
        cost = cross.cost_between(pattern_across(cross), d, b, t, s, side, across=True)
        branches.append(("cross-attention", cost))
    if not block.feedforward.is_none:
        branches.append(("feed-forward", block.feedforward.cost(d, b * t)))
    n, place, parallel = len(branches), block.placement, block.is_parallel
    before = (1 if block.shares_norm else n) if place in ("pre", "sandwich") else 0
    after = {"pre": 0, "post": 1 if parallel else n, "branch": n, "sandwich": n}[place]
    # parallel branches share one input tensor, unless each has its own norm
    shared_input = parallel and (before < n or block.norm.is_none)
    for i, (part, cost) in enumerate(branches):
        yield part, cost if i and shared_input else cost + Cost(saved=b * t * d)
    norm = block.norm.cost(d, b * t)
    inputs = (min(before, 1) if parallel else before) + after
    yield "norms", Cost((before + after) * norm.parameters, saved=inputs * norm.saved)


def head_cost(config: ModelConfig, b: int, t: int) -> Cost:
    return config.head.cost(config.width, config.last_input, b, t, config.ties_output)
