"""Cost of a model from its config alone: parameters, FLOPs and memory. Imports no torch.

    parameters    shared weights count once
    FLOPs         of one forward pass, by the rule of torch's counter: 2·m·n·k for each matmul, 0 for all else.
                  Attention counts all t·s pairs, masked or not. Sparse patterns (window, dilated, block_local,
                  bigbird) count the blocks with at least one visible pair, 128 × 128 or the pattern's own size,
                  which is what a kernel that skips blocks (`flex`) computes
    activations   lower bound of the tensors saved for the backward pass without checkpointing, each once: inputs of
                  linear layers and norms; q, k and v, but no t·s weights, which the kernel recomputes; the input of an
                  activation whose derivative does not follow from its output; both factors of a gate; logits, for the
                  loss. Left out: dropout masks, norm statistics, biases on scores, and the extra tensors of an unfused
                  norm or rotation
    KV cache      of a decoder after `length` tokens, as `new_cache` allocates it, with the source's keys and values in
                  an encoder-decoder. A causal window stores no more than it sees, latent attention the compressed
                  vectors, linear attention and the like one state

b, t, s, d, h, g, k, f, e, v as in `config/__init__.py`; `rows` is the number of vectors that a layer transforms.
"""

from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig, Side
from anyformer.config.cost import Cost
from anyformer.config.model import learning, tower_config
from anyformer.nn.inspection.cost_rules import ADAPTERS, head_cost, side_costs

COLUMNS = ("parameters", "flops", "activation_bytes", "cache_bytes")
FLOPS = ("", "k", "M", "G", "T", "P", "E")
STATE_BYTES = 4  # recurrent states are fp32 at least
BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class PartCost:
    """Cost of one kind of part, summed over all layers that have it."""

    part: str
    layers: int
    parameters: int
    flops: int
    activation_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class Table:
    """Cost of a model: rows, totals, and the sizes they were counted for."""

    rows: tuple[PartCost, ...]
    length: int
    source_length: int | None  # of an encoder-decoder
    batch: int
    bytes_per_value: int
    too_long: tuple[Side, ...]  # sides with fewer positions than the length: the model would refuse it
    trained: int  # parameters that are trained: all, or with an adapter its own and a new head's
    parameters: int
    flops: int
    activation_bytes: int
    cache_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Return an aligned plain-text table."""
        cells = [["part", "layers", "parameters", "FLOPs", "activations", "KV cache"]]
        cells += [[row.part, str(row.layers), *_format(row)] for row in self.rows]
        cells += [["total", "", *_format(self)]]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        form = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{n}}}" for n in widths[1:])])
        lines = [form.format(*line) for line in cells]
        rule = "-" * len(lines[0])
        source = "" if self.source_length is None else f", source length {self.source_length:,}"
        note = f"length {self.length:,}{source}, batch {self.batch:,}, {self.bytes_per_value} bytes a value"
        share = f"trained: {self.trained:,} parameters ({self.trained / max(1, self.parameters):.2%})"
        trained = [share] if self.trained < self.parameters else []
        refusal = [f"too long for the {side}: its positions end before" for side in self.too_long]
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], note, *trained, *refusal])


def _cached(cost: Cost, bytes_per_value: int) -> int:
    return cost.cached * bytes_per_value + cost.states * max(bytes_per_value, STATE_BYTES)


def _format(row: PartCost | Table) -> list[str]:
    flops, *memory = row.flops, row.activation_bytes, row.cache_bytes
    return [f"{row.parameters:,}", human(flops, 1000, FLOPS), *(human(n, 1024, BYTES) for n in memory)]


def human(n: float, base: int, units: tuple[str, ...]) -> str:
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
    """Return the parameters, FLOPs and memory of a forward pass, computed from the config alone.

    The length of an image follows from its config. A stream is counted with one image in each row, and so is a model
    with an image tower.

    Args:
        config: the model, which is not built.
        length: tokens of a row, in an encoder-decoder of the target; None: 1024, or the positions if they are fewer.
        batch: rows.
        source_length: tokens of a source; None: `length`.
        bytes_per_value: 4 for fp32, 2 for half precision.

    Returns:
        A table with a row for each part of the model; printed, it is that of `anyformer count`.

    Raises:
        ConfigError: a size is below 1, above the positions of the model, or of a stack that the model does not have.

    Example:
        >>> config = af.presets.gpt2()
        >>> f"{af.count(config, length=1024).parameters:,}"
        '124,439,808'
    """
    sizes = {"length": length, "batch": batch, "source_length": source_length, "bytes_per_value": bytes_per_value}
    wrong = [Fault(name, f"= {n}: must be at least 1") for name, n in sizes.items() if n is not None and n < 1]
    pair = config.shape == "encoder-decoder"
    if source_length and not pair:
        wrong.append(Fault("source_length", f"only an encoder-decoder has one, and this is {config.shape}-only"))
    image = config.source.length if config.source else None
    if image:
        name = "source_length" if pair else "length"
        if sizes[name] not in (None, image):
            wrong.append(Fault(name, f"= {sizes[name]}: an image is {image} tokens"))
        length, source_length = (length, image) if pair else (image, None)
    if wrong:
        raise ConfigError(wrong)
    reach = [s.limit or 1024 for side, s in config.stacks.items() if side == "decoder" or not image]
    length = min(1024, *reach) if length is None else length
    if pair:
        source_length = source_length or length
    lengths: dict[Side, int] = {"encoder": source_length or length, "decoder": length}

    parts: list[tuple[str, int, Cost]] = []
    for side, stack in config.stacks.items():
        parts += side_costs(config, side, stack, batch, lengths[side], lengths["encoder"])
    parts.append(("head", 1, head_cost(config, batch, length)))
    tower = tower_config(config)
    rows = [
        PartCost(
            name, layers, cost.parameters, cost.flops, cost.saved * bytes_per_value, _cached(cost, bytes_per_value)
        )
        for name, layers, cost in parts
        if cost != Cost() or name.endswith("embeddings")  # a shared table has a row even if it costs nothing
    ]
    if tower is not None:
        inner = count(tower, batch=batch, bytes_per_value=bytes_per_value)
        rows += [replace(row, part=f"image {row.part}") for row in inner.rows]
    too_long = tuple(side for side, stack in config.stacks.items() if lengths[side] > (stack.limit or inf))
    parameters, *totals = (sum(getattr(row, name) for row in rows) for name in COLUMNS)
    trains_head = "head" in learning(config)
    some = (row.parameters for row in rows if row.part.endswith(ADAPTERS) or (row.part == "head" and trains_head))
    trained = parameters if config.adapter is None else sum(some)
    return Table(tuple(rows), length, source_length, batch, bytes_per_value, too_long, trained, parameters, *totals)
