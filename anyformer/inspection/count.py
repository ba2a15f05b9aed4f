"""What a model costs, from its config alone: parameters, FLOPs and memory. Imports no torch.

    parameters    shared weights once
    FLOPs         of one forward pass, as torch's counter has them: 2·m·n·k for each product of matrices, else nothing;
                  attention over all t·s pairs, whatever its pattern hides; but of a sparse pattern (window,
                  dilated, block_local, bigbird) over the blocks of pairs that hold a visible one, 128 × 128 or
                  as the pattern's own blocks are, which is what kernels compute that skip blocks: `flex`
    activations   the least that a training step keeps for its backward pass without checkpointing, each tensor once:
                  the input of every linear layer and norm; q, k and v as attention multiplies them, but no t·s weights,
                  which the kernel recomputes; the input of an activation that does not know its slope from its output;
                  both factors of a gate; logits, for the loss. Left out: dropout masks, the norms' statistics, biases
                  on scores, and what an unfused norm or rotation keeps on top
    KV cache      of a decoder that has read `length` tokens, as `new_cache` makes it, and the source's in an
                  encoder-decoder: a causal window keeps no more than it shows, latent attention what it compressed

b, t, s, d, h, g, k, f, e, v as in `config/__init__.py`; `rows` is how many vectors a layer transforms.
"""

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig, Patches, Side
from anyformer.config.model import learning
from anyformer.inspection.cost_rules import ADAPTERS, Cost, head_cost, side_costs

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
    trained: int  # of the parameters: all, or with an adapter that and a head that is made for a task
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
        few = f"trained: {self.trained:,} parameters ({self.trained / max(1, self.parameters):.2%})"
        trained = [few] if self.trained < self.parameters else []
        refusal = [f"too long for the {side}: its positions end before" for side in self.too_long]
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], note, *trained, *refusal])


def _shown(of: Row | Table) -> list[str]:
    flops, *memory = of.flops, of.activation_bytes, of.cache_bytes
    return [f"{of.parameters:,}", human(flops, 1000, FLOPS), *(human(n, 1024, BYTES) for n in memory)]


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
    """What it costs to read `length` tokens in each of `batch` rows, with numbers of so many bytes (4: fp32).

    Without a length, 1024 or as far as the positions reach. In an encoder-decoder `length` is the target's, and the
    source's too unless that is given. Images have a length of their own.
    """
    sizes = {"length": length, "batch": batch, "source_length": source_length, "bytes_per_value": bytes_per_value}
    wrong = [Fault(name, f"= {n}: must be at least 1") for name, n in sizes.items() if n is not None and n < 1]
    pair = config.shape == "encoder-decoder"
    if source_length and not pair:
        wrong.append(Fault("source_length", f"only an encoder-decoder has one, and this is {config.shape}-only"))
    image = config.source.length if isinstance(config.source, Patches) else None
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
    rows = [
        Row(name, layers, cost.parameters, cost.flops, cost.kept * bytes_per_value, cost.cached * bytes_per_value)
        for name, layers, cost in parts
        if cost != Cost() or name.endswith("embeddings")  # a shared table costs nothing twice, but is there
    ]
    too_long = tuple(side for side, stack in config.stacks.items() if lengths[side] > (stack.limit or inf))
    parameters, *totals = (sum(getattr(row, name) for row in rows) for name in NUMBERS)
    heads = "head" in learning(config)
    some = (row.parameters for row in rows if row.part.endswith(ADAPTERS) or (row.part == "head" and heads))
    trained = parameters if config.adapter is None else sum(some)
    return Table(tuple(rows), length, source_length, batch, bytes_per_value, too_long, trained, parameters, *totals)
