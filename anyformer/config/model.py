"""The grammar of models: `ModelConfig`, and the rules between its parts.

The parts are in the files beside this one. Imports no torch.
"""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from anyformer.config.block import Block, Stack
from anyformer.config.ends import LM, Head, Init, Input, MaskedLM, NoHead, Normal, Special, Tokens
from anyformer.config.mixer import Attention, Mixer, NoOutput
from anyformer.config.pattern import Causal, Full, Pattern
from anyformer.config.position import Position
from anyformer.config.spec import ConfigError, Fault, Size, Spec

Shape = Literal["encoder-decoder", "encoder", "decoder"]
Side = Literal["encoder", "decoder"]


class ModelConfig(Spec):
    """A Transformer. The encoder reads `source`, the decoder reads `target`; the shape is what is there."""

    width: Size
    source: Input | None = None
    target: Input | None = None
    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Head = NoHead()
    tie: Literal["none", "output", "inputs", "all"] = "none"  # output: last input = head; inputs: source = target
    init: Init = Normal()
    special: Special = Special()

    @property
    def shape(self) -> Shape:
        if self.encoder and self.decoder:
            return "encoder-decoder"
        return "encoder" if self.encoder else "decoder"

    @property
    def stacks(self) -> dict[Side, Stack]:
        """The stacks that are there, in the order in which they run."""
        both: dict[Side, Stack | None] = {"encoder": self.encoder, "decoder": self.decoder}
        return {side: stack for side, stack in both.items() if stack}

    @property
    def last_input(self) -> Tokens:
        """The input of the stack that the head reads."""
        last = self.target if self.decoder else self.source
        assert last is not None
        return last

    @model_validator(mode="after")
    def _check(self) -> Self:
        if found := [*_shape(self), *_stacks(self), *_vocabularies(self)]:
            raise ConfigError(found)
        return self


def pattern_of(attention: Attention, side: Side) -> Pattern:
    """The pattern of a self-attention, given or derived."""
    return attention.pattern or (Causal() if side == "decoder" else Full())


def position_of(attention: Attention, stack: Stack) -> Position:
    """The scheme that acts inside a self-attention, given or the stack's."""
    return attention.position or stack.position


# -- rules between parts: each yields what is wrong, in the user's words ----------------------------------------------


def _shape(config: ModelConfig) -> Iterator[Fault]:
    if not config.encoder and not config.decoder:
        yield Fault("", "a model needs an encoder, a decoder, or both")
    for side, name in (("encoder", "source"), ("decoder", "target")):
        stack, read = getattr(config, side), getattr(config, name)
        if stack and not read:
            yield Fault(name, f"is required: the {side} reads it")
        if read and not stack:
            yield Fault(name, f"nothing reads it: there is no {side}")
    if (
        config.shape == "encoder-decoder"
        and config.decoder
        and not any(block.cross for block in (*config.decoder.prefix, *config.decoder.blocks))
    ):
        yield Fault("decoder.blocks", "no block reads the encoder: give at least one a `cross` attention")


def _stacks(config: ModelConfig) -> Iterator[Fault]:
    for side, stack in config.stacks.items():
        if not stack.blocks and stack.depth > len(stack.prefix):
            yield Fault(f"{side}.blocks", "must hold at least one block")
            continue
        if stack.depth < len(stack.prefix):
            yield Fault(
                f"{side}.depth", f"= {stack.depth}: must be at least the {len(stack.prefix)} blocks of `prefix`"
            )
        yield from (f.under(f"{side}.position") for f in _position(stack, config.width))
        for name in ("prefix", "blocks"):
            for i, block in enumerate(getattr(stack, name)):
                yield from (f.under(f"{side}.{name}.{i}") for f in _block(block, side, stack, config))


def _position(stack: Stack, width: int) -> Iterator[Fault]:
    """The stack's own scheme, against the head widths of the layers that take it."""
    mixers = [b.mixer for b in (*stack.prefix, *stack.blocks) if isinstance(b.mixer, Attention)]
    heirs = [mixer for mixer in mixers if mixer.position is None and _divides(mixer, width)]
    found = [f for mixer in heirs for f in stack.position.faults(mixer.widths(width)[0])]
    yield from dict.fromkeys(found)


def _block(block: Block, side: Side, stack: Stack, config: ModelConfig) -> Iterator[Fault]:
    width = config.width
    yield from (f.under("mixer") for f in _mixer(block.mixer, width))
    if not block.cross:
        return
    if side == "encoder" or not config.encoder:
        yield Fault("cross", "there is no encoder to read: only the decoder of an encoder-decoder has cross-attention")
    yield from (f.under("cross") for f in _sizes(block.cross, width))
    position, pattern = block.cross.position, block.cross.pattern
    if position and position.kind != "none":
        yield Fault(
            "cross.position", f"{position.kind} does not apply across: source and target positions are not comparable"
        )
    if pattern and pattern.kind != "full":
        yield Fault(
            "cross.pattern", f"{pattern.kind} does not apply across: source and target positions are not comparable"
        )
    if block.cross.projections != "separate":
        yield Fault(
            "cross.projections", f"= '{block.cross.projections}': across, queries and keys read different inputs"
        )


def _mixer(mixer: Mixer, width: int) -> Iterator[Fault]:
    if not isinstance(mixer, Attention):
        return
    yield from _sizes(mixer, width)
    own = mixer.position
    if own and own.embeds():
        yield Fault("position", f"{own.kind} positions act on the embeddings: set them on the stack")
    elif own and _divides(mixer, width):
        yield from (f.under("position") for f in own.faults(mixer.widths(width)[0]))


def _divides(a: Attention, width: int) -> bool:
    """Whether the head width is known."""
    return bool(a.key_width) or width % a.heads == 0


def _sizes(a: Attention, width: int) -> Iterator[Fault]:
    if a.heads % a.groups:
        divisors = ", ".join(str(n) for n in range(1, min(a.heads, 1024) + 1) if a.heads % n == 0)
        yield Fault("kv_heads", f"= {a.kv_heads}: must divide heads = {a.heads} ({divisors})")
    if not _divides(a, width):
        yield Fault("heads", f"= {a.heads}: must divide width = {width}, or give key_width")
        return
    key, value = a.widths(width)
    if isinstance(a.output, NoOutput) and a.heads * value != width:
        yield Fault("output", f"without a projection heads · value_width = {a.heads * value} must be width = {width}")
    if a.projections != "separate" and a.groups != a.heads:
        yield Fault("projections", f"= '{a.projections}': needs kv_heads = heads = {a.heads}, not {a.groups}")
    if a.projections == "shared_qkv" and key != value:
        yield Fault("projections", f"= 'shared_qkv': needs value_width = key_width = {key}, not {value}")


def _vocabularies(config: ModelConfig) -> Iterator[Fault]:
    source, target = config.source, config.target
    for name, tokens in (("source", source), ("target", target)):
        if tokens and tokens.vocab and tokens.pad is not None and tokens.pad >= tokens.vocab:
            yield Fault(f"{name}.pad", f"= {tokens.pad}: must be an id below vocab = {tokens.vocab}")
    last = target if config.decoder else source
    for name, id in config.special:
        if last and last.vocab and id is not None and id >= last.vocab:
            yield Fault(f"special.{name}", f"= {id}: must be an id below vocab = {last.vocab}")
    if config.tie in ("output", "all") and not isinstance(config.head, (LM, MaskedLM)):
        yield Fault("tie", f"= '{config.tie}': a head of kind '{config.head.kind}' has no vocabulary to tie")
    if config.tie in ("inputs", "all"):
        if not source or not target:
            yield Fault("tie", f"= '{config.tie}': needs a source and a target; with one input use 'output'")
        elif (source.vocab, source.table, source.pad) != (target.vocab, target.table, target.pad):
            yield Fault("tie", f"= '{config.tie}': source and target must agree in vocab, table and pad")
