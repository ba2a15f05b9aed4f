"""The grammar of models: `ModelConfig`, and the rules between its parts.

The parts are in the files beside this one. Imports no torch.
"""

from collections.abc import Iterator
from typing import Literal, Self, assert_never

from pydantic import model_validator

from anyformer.config.adapter import LoRA, misfits
from anyformer.config.block import Block, Side, Stack
from anyformer.config.feedforward import Experts
from anyformer.config.inputs_heads import (
    LM,
    Audio,
    Embedder,
    Head,
    ImageTower,
    Init,
    Input,
    MaskedLM,
    NoHead,
    Normal,
    Patches,
    Special,
    Tokens,
)
from anyformer.config.mixer import (
    Attention,
    Convolution,
    FullyConnected,
    Latent,
    Mixer,
    NoMixer,
    NoOutput,
    PositionMixing,
    Recurrent,
)
from anyformer.config.norm import NoNorm
from anyformer.config.pattern import Causal, Full, Pattern
from anyformer.config.position import Position
from anyformer.config.spec import ConfigError, Fault, Size, Spec
from anyformer.config.stack_rules import skip_faults, stack_faults
from anyformer.config.state_mixer import StateMixer

Shape = Literal["encoder-decoder", "encoder", "decoder"]


class ModelConfig(Spec):
    """A Transformer. The encoder reads `source`, the decoder reads `target`; the shape is which of the two exist."""

    width: Size  # d, the size of hidden states
    source: Input | None = None  # input of the encoder; None: no encoder
    target: Input | None = None  # input of the decoder; None: no decoder
    encoder: Stack | None = None  # layers of the encoder; None: decoder-only
    decoder: Stack | None = None  # layers of the decoder; None: encoder-only
    head: Head = NoHead()  # output layer
    # shared embedding tables: output: last input = head; inputs: source = target
    tie: Literal["none", "output", "inputs", "all"] = "none"
    init: Init = Normal()  # initialisation of the weights
    special: Special = Special()  # ids of special tokens
    # longest text in training, in tokens; bounds the length of generated texts; None: the positions do
    context: Size | None = None
    image_tower: ImageTower | None = None  # rows that are an image are read by this encoder; None: no images
    adapter: LoRA | None = None  # LoRA; only its weights and those of a new head are trained; None: all weights are

    @property
    def shape(self) -> Shape:
        # `is not None`: torch 2.11 cannot compile the question whether a config is true
        if self.encoder is not None and self.decoder is not None:
            return "encoder-decoder"
        return "encoder" if self.encoder is not None else "decoder"

    @property
    def stacks(self) -> dict[Side, Stack]:
        """The stacks of the model, in the order in which they run."""
        both: dict[Side, Stack | None] = {"encoder": self.encoder, "decoder": self.decoder}
        return {side: stack for side, stack in both.items() if stack is not None}

    @property
    def last_input(self) -> Input:
        """The input of the stack that the head reads."""
        last = self.target if self.decoder else self.source
        assert last is not None
        return last

    @property
    def vocab(self) -> int:
        """v of the head's side; 0 where that reads no tokens."""
        return self.last_input.rows if isinstance(self.last_input, Tokens) else 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = [*_shape(self), *_stacks(self), *_inputs(self), *_vocabularies(self), *_tower(self)]
        if self.adapter and not found:
            found = [fault.under("adapter") for fault in misfits(self.adapter, self.stacks, self.width)]
        if found:
            raise ConfigError(found)
        return self


def tower_config(config: ModelConfig) -> ModelConfig | None:
    """Return the config of the image tower; None where there is none."""
    if (tower := config.image_tower) is None or not isinstance(config.head, Embedder):
        return None
    out = Embedder(pool=tower.pool, projection=config.head.vector_width(config.width))
    return ModelConfig(width=tower.width, source=tower.source, encoder=tower.encoder, head=out, init=config.init)


def pattern_of(attention: Attention, side: Side) -> Pattern:
    """Return the pattern of a self-attention, given or derived; a decoder is causal unless it is given otherwise."""
    ahead = side == "encoder"
    return attention.pattern.towards(ahead) if attention.pattern else Full() if ahead else Causal()


def pattern_across(attention: Attention) -> Pattern:
    """Return the pattern of a cross-attention, given or derived; by default the whole source is visible."""
    return attention.pattern.towards(True) if attention.pattern else Full()


def position_of(attention: Attention, stack: Stack) -> Position:
    """Return the scheme inside a self-attention, given or the stack's."""
    return attention.position or stack.position


def with_position(block: Block, stack: Stack) -> Block:
    """Return a block whose self-attention names its scheme, given or the stack's."""
    if not isinstance(block.mixer, Attention):
        return block
    mixer = block.mixer.model_copy(update={"position": position_of(block.mixer, stack)})
    return block.model_copy(update={"mixer": mixer})


def causal_of(mixer: Convolution | FullyConnected | PositionMixing, side: Side) -> bool:
    """Return whether a mixer reads only earlier tokens, given or derived."""
    return side == "decoder" if mixer.causal is None else mixer.causal


def learning(config: ModelConfig) -> tuple[str, ...]:
    """Return name patterns of the trained weights: all, or with an adapter its weights and a task's head."""
    if config.adapter is None:
        return ("*",)
    return ("*.lora",) if isinstance(config.head, (LM, MaskedLM)) else ("*.lora", "head")


def encoder_init_layers(config: ModelConfig) -> dict[int, Recurrent]:
    """Return the decoder layers that start from the final state of the encoder layer of the same index."""
    mixers = [block.mixer for block in config.decoder.unrolled()] if config.decoder else []
    return {i: mixer for i, mixer in enumerate(mixers) if isinstance(mixer, Recurrent) and _begins(mixer)}


def _begins(mixer: Mixer) -> bool:
    return isinstance(mixer, Recurrent) and mixer.begin == "encoder"


# -- rules between parts: each yields faults, with the names that users write ------------------------------------------


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
        and not any(b.cross or _begins(b.mixer) for b in (*config.decoder.prefix, *config.decoder.blocks))
    ):
        what = "give at least one a `cross` attention, or a recurrent mixer with begin = 'encoder'"
        yield Fault("decoder.blocks", f"no block reads the encoder: {what}")


def _stacks(config: ModelConfig) -> Iterator[Fault]:
    for side, stack in config.stacks.items():
        if not stack.blocks and stack.depth > len(stack.prefix):
            yield Fault(f"{side}.blocks", "must hold at least one block")
            continue
        if stack.depth < len(stack.prefix):
            what = f"= {stack.depth}: must be at least the {len(stack.prefix)} blocks of `prefix`"
            yield Fault(f"{side}.depth", what)
        own = (*stack_faults(stack, side, bool(config.encoder)), *skip_faults(stack, config.width))
        yield from (f.under(side) for f in own)
        yield from (f.under(f"{side}.position") for f in _position(stack, config.width))
        for name in ("prefix", "blocks"):
            for i, block in enumerate(getattr(stack, name)):
                yield from (f.under(f"{side}.{name}.{i}") for f in _block(block, side, stack, config))
    yield from _handover(config)


def _handover(config: ModelConfig) -> Iterator[Fault]:
    """Yield faults of decoder cells that start from an encoder state of another kind or width."""
    encoder, decoder = config.encoder, config.decoder
    if not encoder or not decoder or not all(s.blocks or s.depth <= len(s.prefix) for s in (encoder, decoder)):
        return
    givers = [block.mixer for block in encoder.unrolled()]
    found: dict[str, Fault] = {}  # one of each block, however often its tile comes back
    if encoder.pooling and encoder_init_layers(config):
        yield Fault("encoder.pooling", "states go from token to token: a decoder cannot begin with those of windows")
    for i, taker in encoder_init_layers(config).items():
        giver = givers[i] if i < len(givers) else None
        cell, width = taker.cell, taker.hidden(config.width)
        if not isinstance(giver, Recurrent) or (giver.cell, giver.hidden(config.width)) != (cell, width):
            head = len(decoder.prefix)
            place = f"prefix.{i}" if i < head else f"blocks.{(i - head) % len(decoder.blocks)}"
            what = f"= 'encoder': layer {i} of the encoder must be recurrent, too, with cell '{cell}' and width {width}"
            found.setdefault(place, Fault(f"decoder.{place}.mixer.begin", what))
    yield from found.values()


def _position(stack: Stack, width: int) -> Iterator[Fault]:
    """Yield faults of the stack's scheme for the head widths of the layers that use it."""
    mixers = [b.mixer for b in (*stack.prefix, *stack.blocks) if isinstance(b.mixer, Attention)]
    scheme = stack.position
    if scheme.kind != "none" and not scheme.embeds() and not any(mixer.position is None for mixer in mixers):
        what = "no layer takes it: it acts inside self-attention; " + (
            "all that have it have a scheme of their own"
            if mixers
            else "set it to 'none', which is usual for mixers with a state, or to sinusoidal or learned"
        )
        yield Fault("", f"of kind '{scheme.kind}': {what}")
    heirs = [mixer for mixer in mixers if mixer.position is None and _divides(mixer, width)]
    found = [f for mixer in heirs for f in _turned(stack.position, mixer, width)]
    yield from dict.fromkeys(found)


def _block(block: Block, side: Side, stack: Stack, config: ModelConfig) -> Iterator[Fault]:
    width = config.width
    yield from (f.under("mixer") for f in _mixer(block.mixer, side, config))
    if not block.residual and block.mixer.kind == "none" and not block.cross and block.feedforward.kind == "none":
        yield Fault("residual", "= False: a block without sublayers has nothing else to pass on")
    if isinstance(block.feedforward, Experts):
        yield from (f.under("feedforward") for f in block.feedforward.faults())
    if not block.cross:
        return
    if side == "encoder" or not config.encoder:
        yield Fault("cross", "there is no encoder to read: only the decoder of an encoder-decoder has cross-attention")
    yield from (f.under("cross") for f in _sizes(block.cross, width))
    position = block.cross.position
    if position and position.kind != "none":
        yield Fault(
            "cross.position", f"{position.kind} does not apply across: source and target positions are not comparable"
        )
    if block.cross.projections != "separate":
        yield Fault(
            "cross.projections", f"= '{block.cross.projections}': across, queries and keys read different inputs"
        )
    if isinstance(block.cross.compress, Latent):
        yield Fault("cross.compress", "latent attention reads its own tokens: across, leave compress out")


def _mixer(mixer: Mixer, side: Side, config: ModelConfig) -> Iterator[Fault]:
    match mixer:
        case Attention():
            yield from _sizes(mixer, config.width)
            own = mixer.position
            if own and own.embeds():
                yield Fault("position", f"{own.kind} positions act on the embeddings: set them on the stack")
            elif own and _divides(mixer, config.width):
                yield from (f.under("position") for f in _turned(own, mixer, config.width))
        case StateMixer():
            yield from mixer.faults(config.width)
        case Recurrent():
            if mixer.both_ways and side == "decoder":
                yield Fault("both_ways", "= True: a decoder reads in one direction; only an encoder reads both ways")
            if mixer.begin == "encoder" and (side == "encoder" or not config.encoder):
                yield Fault("begin", "= 'encoder': there is no encoder before this layer; leave begin out")
        case Convolution() | FullyConnected() | PositionMixing():
            if side == "decoder" and not causal_of(mixer, side):
                yield Fault("causal", "= False: a decoder never reads what comes later; leave causal out")
        case NoMixer():
            return
        case _:
            assert_never(mixer)


def _turned(scheme: Position, mixer: Attention, width: int) -> Iterator[Fault]:
    """Yield faults of a scheme at the width it rotates, under the name of that width in this mixer."""
    name = "compress.rotary_width" if isinstance(mixer.compress, Latent) else "key_width"
    if scheme.reads_content() and isinstance(mixer.compress, Latent):
        yield Fault("", f"of kind '{scheme.kind}': projects its vectors like tokens, which latent attention compresses")
    yield from (Fault(f.path, f.message.replace("key_width", name)) for f in scheme.faults(mixer.rotary_width(width)))


def _divides(a: Attention, width: int) -> bool:
    """Return whether the head width is known."""
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
    yield from a.faults()
    if isinstance(a.compress, Latent):
        yield from _latent(a, a.compress, key)


def _latent(a: Attention, compress: Latent, key: int) -> Iterator[Fault]:
    if compress.rotary_width >= key:
        yield Fault("compress.rotary_width", f"= {compress.rotary_width}: must be less than key_width = {key}")
    if a.groups != a.heads:
        yield Fault("kv_heads", f"= {a.kv_heads}: in latent attention every head has its own keys: leave kv_heads out")
    if a.projections != "separate":
        yield Fault("projections", f"= '{a.projections}': latent attention compresses keys and values, not queries")
    if not isinstance(a.qk_norm, NoNorm):
        yield Fault("qk_norm", "latent attention norms what it compresses: set compress.norm instead")


def _inputs(config: ModelConfig) -> Iterator[Fault]:
    if isinstance(config.target, (Patches, Audio)):
        what = "patches" if isinstance(config.target, Patches) else "sounds"
        yield Fault("target", f"{what} are read at once: only an encoder reads them")
    for name, tokens in (("source", config.source), ("target", config.target)):
        if isinstance(tokens, Tokens) and tokens.media is not None:
            inner = tokens.inner_width(config.width)
            yield from (fault.under(f"{name}.media") for fault in tokens.media.faults(inner))
        if isinstance(tokens, Tokens) and tokens.spelling.kind != "none" and config.encoder and config.decoder:
            yield Fault(f"{name}.spelling", f"= '{tokens.spelling.kind}': is for models of one stack; leave it out")
    read, stack = config.source, config.encoder
    if not isinstance(read, Patches) or not stack:
        return
    for name, n in (("image_height", read.image_height), ("image_width", read.image_width)):
        if n and n % read.patch:
            yield Fault(f"source.{name}", f"= {n}: must be a multiple of patch = {read.patch}")
    for limit, name in stack.ends:
        if limit < read.length:
            yield Fault("encoder", f"has {limit} {name}: an image is {read.length} tokens")


def _tower(config: ModelConfig) -> Iterator[Fault]:
    if config.image_tower is None:
        return
    if not isinstance(config.head, Embedder):
        yield Fault("image_tower", f"needs the head 'embedder', not '{config.head.kind}'")
    read = config.target or config.source
    if len(config.stacks) != 1 or not isinstance(read, Tokens) or read.media:
        yield Fault("image_tower", "is for models of one stack that reads tokens, without `media`")
    try:
        tower_config(config)
    except ConfigError as error:
        yield from (fault.under("image_tower") for fault in error.faults)


def _vocabularies(config: ModelConfig) -> Iterator[Fault]:
    source, target = config.source, config.target
    for name, read in (("source", source), ("target", target)):
        if isinstance(read, Tokens) and read.vocab and read.pad is not None and read.pad >= read.vocab:
            yield Fault(f"{name}.pad", f"= {read.pad}: must be an id below vocab = {read.vocab}")
    last = target if config.decoder else source
    if last and not isinstance(last, Tokens):
        if isinstance(config.head, (LM, MaskedLM)):
            why = f"{last.kind} have no vocabulary; 'token_labels' has labels of its own"
            yield Fault("head.kind", f"= '{config.head.kind}': {why}")
        for name, id in config.special.named():
            yield Fault(f"special.{name}", f"= {id}: {last.kind} have no ids")
    for name, id in config.special.named():
        if isinstance(last, Tokens) and last.vocab and id >= last.vocab:
            yield Fault(f"special.{name}", f"= {id}: must be an id below vocab = {last.vocab}")
    if config.tie in ("output", "all") and not isinstance(config.head, (LM, MaskedLM)):
        yield Fault("tie", f"= '{config.tie}': a head of kind '{config.head.kind}' has no vocabulary to tie")
    if config.tie in ("inputs", "all"):
        if not source or not target:
            yield Fault("tie", f"= '{config.tie}': needs a source and a target; with one input use 'output'")
        elif not isinstance(source, Tokens) or not isinstance(target, Tokens):
            yield Fault("tie", f"= '{config.tie}': needs tokens on both sides, not {source.kind} and {target.kind}")
        elif (source.vocab, source.table, source.pad) != (target.vocab, target.table, target.pad):
            yield Fault("tie", f"= '{config.tie}': source and target must agree in vocab, table and pad")
