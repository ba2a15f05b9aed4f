"""Adapters: small trained weights added to the frozen ones of a pretrained model. Imports no torch."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from anyformer.config.block import Block, Side, Stack
from anyformer.config.feedforward import Experts, Gated, Network, NoFeedForward, hidden_width
from anyformer.config.mixer import Attention, Latent, Mixer, Projected, Recurrent
from anyformer.config.position import Disentangled, Position
from anyformer.config.spec import Fault, Positive, Probability, Size, Spec, close_to
from anyformer.config.state_mixer import ChannelDecay, GatedDelta, LinearAttention, Mamba2


class LoRA(Spec):
    """W + alpha/rank · B A in place of W, for linear layers within blocks (Hu et al. 2022).

    A [rank, in] is random at first and B [out, rank] is 0, so training starts from the model as it was. Experts,
    routers, recurrent cells and convolutions have no adapter.
    """

    kind: Literal["lora"] = "lora"
    rank: Size  # rank of B A
    alpha: Positive | None = None  # the update is scaled by alpha/rank; None: rank, a factor of 1
    dropout: Probability = 0.0  # on the input of A
    targets: tuple[str, ...] = ("*.blocks",)  # names of layers or of modules around them: "*.mixer", "encoder.blocks.0"

    @property
    def scale(self) -> float:
        """alpha/rank"""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class Matrix(NamedTuple):
    """A linear layer of a block, by the name of its module."""

    name: str
    inputs: int
    outputs: int
    across: bool = False  # its input is the encoder's output
    rows: int | None = None  # vectors that it reads in a pass; None: the tokens


def within(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern, or is part of a module that does; `*` matches anything."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def matrices(block: Block, width: int, position: Position) -> Iterator[Matrix]:
    """Yield the linear layers of a block that may have an adapter; `position` is the scheme of its stack."""
    mixer, feedforward = block.mixer, block.feedforward
    if isinstance(mixer, Attention):
        yield from _attention(mixer, width, "mixer.inner", cross=False)
        if isinstance(scheme := mixer.position or position, Disentangled) and scheme.projections == "separate":
            k, _ = mixer.widths(width)
            queries = mixer.heads * k * (scheme.terms != "content_to_position")
            keys = mixer.groups * k * (scheme.terms != "position_to_content")
            yield Matrix("mixer.inner.own", width, queries + keys, rows=2 * scheme.buckets)
    if isinstance(mixer, Recurrent) and (mixer.both_ways or mixer.hidden(width) != width):
        yield Matrix("mixer.inner.out", mixer.hidden(width) * (2 if mixer.both_ways else 1), width)
    yield from _state_mixer(mixer, width, "mixer.inner")
    if block.cross:
        yield from _attention(block.cross, width, "cross.inner", cross=True)
    if isinstance(feedforward, Experts) and feedforward.shared:
        hidden = feedforward.shared * hidden_width(feedforward.expert, width)
        yield from _network(feedforward.expert, width, hidden, "feedforward.inner.shared")
    elif not isinstance(feedforward, Experts | NoFeedForward):
        yield from _network(feedforward, width, hidden_width(feedforward, width), "feedforward.inner")


def _attention(a: Attention, d: int, at: str, cross: bool) -> Iterator[Matrix]:
    h, g, (k, k_v) = a.heads, a.groups, a.widths(d)
    if cross:
        yield Matrix(f"{at}.q", d, h * k)
        yield Matrix(f"{at}.kv", d, g * (k + k_v), across=True)
    elif isinstance(a.compress, Latent):
        rank, turning, query = a.compress.rank, a.compress.rotary_width, a.compress.query_rank
        yield Matrix(f"{at}.latent.down", d, (query or h * k) + rank + turning)
        if query:
            yield Matrix(f"{at}.latent.query_up", query, h * k)
        yield Matrix(f"{at}.latent.up", rank, h * (k - turning + k_v))
    else:
        both = g * k * (a.projections == "separate") + g * k_v * (a.projections != "shared_qkv")
        yield Matrix(f"{at}.qkv", d, h * k + both)
    if a.global_projections:
        yield Matrix(f"{at}.global_qkv", d, h * k + g * (k + k_v))
    if gates := a.gate_size(d):
        yield Matrix(f"{at}.gate", d, gates)
    if isinstance(a.output, Projected):
        yield Matrix(f"{at}.out", h * k_v, d)


def _state_mixer(mixer: Mixer, d: int, at: str) -> Iterator[Matrix]:
    match mixer:
        case LinearAttention(heads=h):
            k, k_v = mixer.widths(d)
            yield Matrix(f"{at}.qkv", d, h * (2 * k + k_v * (1 + mixer.gate)))
            if isinstance(mixer.decay, ChannelDecay):
                yield Matrix(f"{at}.decay_down", d, mixer.decay.rank)
                yield Matrix(f"{at}.decay_up", mixer.decay.rank, h * k)
            yield Matrix(f"{at}.out", h * k_v, d)
        case GatedDelta(heads=h):
            k, k_v = mixer.widths(d)
            yield Matrix(f"{at}.qkvz", d, 2 * (mixer.groups * k + h * k_v))
            yield Matrix(f"{at}.rates", d, 2 * h)
            yield Matrix(f"{at}.out", h * k_v, d)
        case Mamba2(heads=h, groups=g, state=n):
            inner = mixer.inner_width(d)
            yield Matrix(f"{at}.inputs", d, 2 * (inner + g * n) + h)
            yield Matrix(f"{at}.out", inner, d)


def _network(spec: Network, d: int, f: int, at: str) -> Iterator[Matrix]:
    gated = isinstance(spec, Gated)
    yield Matrix(f"{at}.gate_up" if gated else f"{at}.up", d, f * (1 + gated))
    yield Matrix(f"{at}.down", f, d)


def every_matrix(stacks: Mapping[Side, Stack], width: int) -> dict[str, Matrix]:
    """Return the linear layers of all blocks by name; a block that layers share counts once."""
    found = {}
    for side, stack in stacks.items():
        for run, block in zip(stack.runs, stack.unrolled(), strict=True):
            for matrix in matrices(block, width, stack.position):
                name = f"{side}.blocks.{run}.{matrix.name}"
                found[name] = matrix._replace(name=name)
    return found


def adapted(adapter: LoRA, stacks: Mapping[Side, Stack], width: int) -> dict[str, Matrix]:
    """Return the linear layers that the adapter targets."""
    every = every_matrix(stacks, width).items()
    return {name: matrix for name, matrix in every if any(within(name, target) for target in adapter.targets)}


def misfits(adapter: LoRA, stacks: Mapping[Side, Stack], width: int) -> Iterator[Fault]:
    """Yield the faults of an adapter for a model."""
    every = every_matrix(stacks, width)
    if not adapter.targets:
        yield Fault("targets", "= []: must name at least one part; all linear layers of blocks are '*.blocks'")
    for i, target in enumerate(adapter.targets):
        if not any(within(name, target) for name in every):
            yield Fault(f"targets.{i}", f"= '{target}': the blocks have no such linear layer; {_hint(target, every)}")
    found = adapted(adapter, stacks, width).values()
    if small := [matrix for matrix in found if adapter.rank > min(matrix.inputs, matrix.outputs)]:
        name, inputs, outputs, *_ = min(small, key=lambda matrix: min(matrix.inputs, matrix.outputs))
        yield Fault("rank", f"= {adapter.rank}: must be at most {min(inputs, outputs)}: {name} is {outputs} x {inputs}")


def _hint(target: str, names: Iterable[str]) -> str:
    parts = list(dict.fromkeys(name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)))
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    close = close_to(target, [*parts, *(f"*.{name}" for name in last)])
    return f"did you mean '{close}'?" if close else f"layers are {', '.join(last)}" if last else "they have none"
