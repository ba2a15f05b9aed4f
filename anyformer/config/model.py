"""The grammar of models: `ModelConfig`, and the rules between its parts.

The parts are in the files beside this one. Imports no torch.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from anyformer.config.adapter import LoRA, misfits
from anyformer.config.attention import Attention
from anyformer.config.block import Block, Side, Stack, skip_faults, stack_faults
from anyformer.config.families import Mixer
from anyformer.config.heads import Head, ImageTower, NoHead
from anyformer.config.inputs import IdInput, Input
from anyformer.config.mixer import Recurrent
from anyformer.config.position import Position, RotaryScheme
from anyformer.config.spec import BY_KIND, ConfigError, Count, Fault, Flag, Positive, Size, Spec

Shape = Literal["encoder-decoder", "encoder", "decoder"]


class Normal(Spec):
    """Every weight from N(0, std²); `residual`: what enters the residual stream is divided by sqrt(2·depth) (GPT-2)."""

    by_inputs: ClassVar[bool] = False

    kind: Literal["normal"] = "normal"
    std: Positive = 0.02  # standard deviation of the weights
    residual: Flag = False  # weights of layers that end in the residual stream are divided by sqrt(2 · depth)


class Xavier(Spec):
    """Glorot's uniform for matrices, N(0, 1/d) for embeddings (the 2017 Transformer)."""

    by_inputs: ClassVar[bool] = True  # a matrix of twice the inputs has smaller weights

    kind: Literal["xavier"] = "xavier"


class FanIn(Spec):
    """N(0, 1/inputs) for matrices (queries also by 1/k when scores are unscaled), N(0, 1) for embeddings (T5)."""

    by_inputs: ClassVar[bool] = True

    kind: Literal["fan_in"] = "fan_in"


Init = Annotated[Normal | Xavier | FanIn, *BY_KIND]


class Special(Spec):
    """Token ids with a meaning; `start` is what a decoder reads first."""

    pad: Count | None = None  # id of padding
    bos: Count | None = None  # id of the begin-of-text token
    eos: Count | None = None  # id of the end-of-text token: generation stops there
    start: Count | None = None  # id that a decoder reads first
    stops: tuple[Count, ...] = ()  # other ids that end a text, as `eos` does (Llama 3's <|eot_id|>)

    def named(self) -> Iterator[tuple[str, int]]:
        """Each id with its name."""
        one = {"pad": self.pad, "bos": self.bos, "eos": self.eos, "start": self.start}
        yield from ((name, id) for name, id in one.items() if id is not None)
        yield from ((f"stops.{i}", id) for i, id in enumerate(self.stops))


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
    def trained_length(self) -> int | None:
        """The longest text in training, in tokens, given or by the scaling of rotary positions; None: unknown."""
        position = self.decoder.position if self.decoder else None
        return self.context or (position.trained_length if isinstance(position, RotaryScheme) else None)

    @property
    def vocab(self) -> int:
        """v of the head's side; 0 where that reads no tokens."""
        return self.last_input.rows

    @property
    def inputs(self) -> dict[str, Input]:
        """The inputs by the names of their fields, in the order in which they are read."""
        both = {"source": self.source, "target": self.target}
        return {name: read for name, read in both.items() if read is not None}

    @property
    def generates(self) -> bool:
        """True if it predicts the next token from the ones before it."""
        return self.head.output == "lm" and self.decoder is not None

    @property
    def ties_inputs(self) -> bool:
        """True if source and target have one table."""
        return self.tie in ("inputs", "all")

    @property
    def ties_output(self) -> bool:
        """True if the table of the last input is the head's, too."""
        return self.tie in ("output", "all")

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
    if (tower := config.image_tower) is None or (out := config.head.for_images(tower.pool, config.width)) is None:
        return None
    return ModelConfig(width=tower.width, source=tower.source, encoder=tower.encoder, head=out, init=config.init)


def position_of(attention: Attention, stack: Stack) -> Position:
    """Return the scheme inside a self-attention, given or the stack's."""
    return attention.position or stack.position


def learning(config: ModelConfig) -> tuple[str, ...]:
    """Return name patterns of the trained weights: all, or with an adapter its weights and a task's head."""
    if config.adapter is None:
        return ("*",)
    return ("*.lora",) if config.head.predicts_tokens else ("*.lora", "head")


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
        own = (*stack_faults(stack, side, bool(config.encoder), config.width), *skip_faults(stack, config.width))
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
    mixers = [a for b in (*stack.prefix, *stack.blocks) if (a := b.attention)]
    scheme = stack.position
    if scheme.kind != "none" and not scheme.embeds() and not any(mixer.position is None for mixer in mixers):
        what = "no layer takes it: it acts inside self-attention; " + (
            "all that have it have their own scheme"
            if mixers
            else "set it to 'none', which is usual for mixers with a state, or to sinusoidal or learned"
        )
        yield Fault("", f"of kind '{scheme.kind}': {what}")
    heirs = [mixer for mixer in mixers if mixer.position is None and mixer.divides(width)]
    found = [f for mixer in heirs for f in mixer.position_faults(stack.position, width)]
    yield from dict.fromkeys(found)


def _block(block: Block, side: Side, stack: Stack, config: ModelConfig) -> Iterator[Fault]:
    width = config.width
    yield from (f.under("mixer") for f in block.mixer.faults(width, side, config.encoder is not None))
    if not block.residual and block.mixer.kind == "none" and not block.cross and block.feedforward.kind == "none":
        yield Fault("residual", "= False: a block without sublayers has nothing else to pass on")
    yield from (f.under("feedforward") for f in block.feedforward.faults())
    if not block.cross:
        return
    if side == "encoder" or not config.encoder:
        yield Fault("cross", "there is no encoder to read: only the decoder of an encoder-decoder has cross-attention")
    yield from (f.under("cross") for f in block.cross.size_faults(width))
    position = block.cross.position
    if position and position.kind != "none":
        yield Fault(
            "cross.position", f"{position.kind} does not apply across: source and target positions are not comparable"
        )
    if block.cross.projections != "separate":
        yield Fault(
            "cross.projections", f"= '{block.cross.projections}': across, queries and keys read different inputs"
        )
    if block.cross.latent:
        yield Fault("cross.compress", "latent attention reads its own tokens: across, leave compress out")


def _inputs(config: ModelConfig) -> Iterator[Fault]:
    sides: dict[str, Side] = {"source": "encoder", "target": "decoder"}
    for name, read in config.inputs.items():
        pair = config.shape == "encoder-decoder"
        yield from (fault.under(name) for fault in read.faults(config.width, sides[name], pair))
    if config.source and config.source.length and config.encoder:
        for limit, name in config.encoder.ends:
            if limit < config.source.length:
                yield Fault("encoder", f"has {limit} {name}: an image is {config.source.length} tokens")


def _tower(config: ModelConfig) -> Iterator[Fault]:
    if config.image_tower is None:
        return
    if config.head.for_images(config.image_tower.pool, config.width) is None:
        yield Fault("image_tower", f"needs the head 'embedder', not '{config.head.kind}'")
    read = config.target or config.source
    if len(config.stacks) != 1 or not isinstance(read, IdInput) or read.stream:
        yield Fault("image_tower", "is for models of one stack that reads tokens, without `media`")
    try:
        tower_config(config)
    except ConfigError as error:
        yield from (fault.under("image_tower") for fault in error.faults)


def _vocabularies(config: ModelConfig) -> Iterator[Fault]:
    source, target, head = config.source, config.target, config.head
    last = target if config.decoder else source
    if last and not isinstance(last, IdInput):
        if head.predicts_tokens:
            why = f"{last.kind} have no vocabulary; 'token_labels' has its own labels"
            yield Fault("head.kind", f"= '{head.kind}': {why}")
        for name, id in config.special.named():
            yield Fault(f"special.{name}", f"= {id}: {last.kind} have no ids")
    for name, id in config.special.named():
        if isinstance(last, IdInput) and last.vocab and id >= last.vocab:
            yield Fault(f"special.{name}", f"= {id}: must be an id below vocab = {last.vocab}")
    if config.ties_output and last and head.table_width(config.width, last) is None:
        yield Fault("tie", f"= '{config.tie}': a head of kind '{head.kind}' has no vocabulary to tie")
    elif config.ties_output and isinstance(last, IdInput) and last.shared_table is None:
        yield Fault("tie", f"= '{config.tie}': an input of kind '{last.kind}' has no table to tie")
    if config.ties_inputs:
        if not source or not target:
            yield Fault("tie", f"= '{config.tie}': needs a source and a target; with one input use 'output'")
        elif source.shared_table is None or target.shared_table is None:
            yield Fault("tie", f"= '{config.tie}': needs tokens on both sides, not {source.kind} and {target.kind}")
        elif source.shared_table != target.shared_table:
            yield Fault("tie", f"= '{config.tie}': source and target must agree in vocab, table and pad")
