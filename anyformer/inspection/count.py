"""What a model costs, from its config alone: parameters, FLOPs and memory. Imports no torch.

    parameters    shared weights once
    FLOPs         of one forward pass, as torch's counter has them: 2·m·n·k for each product of matrices, else nothing;
                  attention over all t·s pairs, whatever its pattern hides
    activations   the least that a training step keeps for its backward pass without checkpointing, each tensor once:
                  the input of every linear layer and norm; q, k and v as attention multiplies them, but no t·s weights,
                  which the kernel recomputes; the input of an activation that does not know its slope from its output;
                  both factors of a gate; logits, for the loss. Left out: dropout masks, the norms' statistics, biases
                  on scores, and what an unfused norm or rotation keeps on top
    KV cache      of a decoder that has read `length` tokens, and the source's in an encoder-decoder; every layer has
                  a slot for every token, also where a window would let go of old ones

b, t, s, d, h, g, k, f, e, v as in `config/parts.py`; `rows` is how many vectors a layer transforms.
"""

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from math import inf, prod
from typing import Any, assert_never

from anyformer.config import (
    LM,
    Activation,
    Attention,
    Block,
    Classifier,
    ConfigError,
    Embedder,
    FactorisedTable,
    Fault,
    FullTable,
    Gated,
    Gelu,
    HeadTransform,
    LayerNorm,
    LeakyRelu,
    MaskedLM,
    ModelConfig,
    NoFeedForward,
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

NUMBERS = ("parameters", "flops", "activation_bytes", "cache_bytes")
FLOPS = ("", "k", "M", "G", "T", "P", "E")
BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Row:
    """One kind of part, over all the layers that have it."""

    part: str
    layers: int
    parameters: int
    flops: int
    activation_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class Table:
    """The rows, their totals, and what they were counted for."""

    rows: tuple[Row, ...]
    length: int
    source_length: int | None  # of an encoder-decoder
    batch: int
    bytes_per_value: int
    too_long: tuple[Side, ...]  # the sides whose positions end before: the model would refuse
    parameters: int
    flops: int
    activation_bytes: int
    cache_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Plain text, aligned."""
        cells = [["part", "layers", "parameters", "FLOPs", "activations", "KV cache"]]
        cells += [[row.part, str(row.layers), *_shown(row)] for row in self.rows]
        cells += [["total", "", *_shown(self)]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        form = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{n}}}" for n in widths[1:])])
        lines = [form.format(*line) for line in cells]
        rule = "-" * len(lines[0])
        source = "" if self.source_length is None else f", source length {self.source_length:,}"
        note = f"length {self.length:,}{source}, batch {self.batch:,}, {self.bytes_per_value} bytes a value"
        refusal = [f"too long for the {side}: its positions end before" for side in self.too_long]
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], note, *refusal])


def _shown(of: Row | Table) -> list[str]:
    flops, *memory = of.flops, of.activation_bytes, of.cache_bytes
    return [f"{of.parameters:,}", _human(flops, 1000, FLOPS), *(_human(n, 1024, BYTES) for n in memory)]


def _human(n: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while n >= base and power + 1 < len(units):
        n, power = n / base, power + 1
    return f"{n:.{min(power, 1)}f} {units[power]}".strip()


def count(
    config: ModelConfig,
    length: int | None = None,
    *,
    batch: int = 1,
    source_length: int | None = None,
    bytes_per_value: int = 4,
) -> Table:
    """What it costs to read `length` tokens in each of `batch` rows, with numbers of so many bytes (4: fp32).

    Without a length, 1024 or as far as the positions reach. In an encoder-decoder `length` is the target's, and the
    source's too unless that is given.
    """
    reach = [stack.position.limit or 1024 for stack in config.stacks.values()]
    length = min(1024, *reach) if length is None else length
    sizes = {"length": length, "batch": batch, "source_length": source_length, "bytes_per_value": bytes_per_value}
    wrong = [Fault(name, f"= {n}: must be at least 1") for name, n in sizes.items() if n is not None and n < 1]
    if source_length and config.shape != "encoder-decoder":
        wrong.append(Fault("source_length", f"only an encoder-decoder has one, and this is {config.shape}-only"))
    if wrong:
        raise ConfigError(wrong)
    if config.shape == "encoder-decoder":
        source_length = source_length or length
    lengths: dict[Side, int] = {"encoder": source_length or length, "decoder": length}

    parts: list[tuple[str, int, Cost]] = []
    for side, stack in config.stacks.items():
        parts += _side(config, side, stack, batch, lengths[side], lengths["encoder"])
    parts.append(("head", 1, _head(config, batch, length)))
    rows = [
        Row(name, layers, cost.parameters, cost.flops, cost.kept * bytes_per_value, cost.cached * bytes_per_value)
        for name, layers, cost in parts
        if cost != Cost() or name.endswith("embeddings")  # a shared table costs nothing twice, but is there
    ]
    too_long = tuple(side for side, stack in config.stacks.items() if lengths[side] > (stack.position.limit or inf))
    totals = [sum(getattr(row, name) for row in rows) for name in NUMBERS]
    return Table(tuple(rows), length, source_length, batch, bytes_per_value, too_long, *totals)


# -- the parts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Parameters, FLOPs, and how many numbers are kept for the backward pass and in the cache."""

    parameters: int = 0
    flops: int = 0
    kept: int = 0
    cached: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def _side(config: ModelConfig, side: Side, stack: Stack, b: int, t: int, s: int) -> Iterator[tuple[str, int, Cost]]:
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
    within = [(position_of(block.mixer, stack), block.mixer.heads, i) for i, block in enumerate(own)]
    schemes = {(at, heads, i if at.per_layer else None) for at, heads, i in within if not at.embeds()}
    tables = [at.tables(d, heads) for at, heads, _ in schemes]
    if stack.position.embeds():
        tables.append(stack.position.tables(inner, 0))
    return sum(prod(shape) for table in tables for shape in table.values())


def _block(block: Block, d: int, b: int, t: int, s: int, caching: bool) -> Iterator[tuple[str, Cost]]:
    branches = [("self-attention", _attention(block.mixer, d, b, t, t, caching))]
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


def _head(config: ModelConfig, b: int, t: int) -> Cost:
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
