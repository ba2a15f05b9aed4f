"""Random small models over the product of the parts, for the laws."""

from itertools import pairwise

import torch
from hypothesis import strategies as st

from anyformer.attention.layout import Layout
from anyformer.config import (
    LM,
    Alibi,
    Attention,
    BatchNorm,
    BigBird,
    Block,
    BlockLocal,
    Causal,
    Convolution,
    Dilated,
    Disentangled,
    DynamicTanh,
    FactorisedTable,
    Full,
    FullTable,
    FullyConnected,
    Graph,
    InvSqrtKey,
    InvSqrtWidth,
    Latent,
    LayerNorm,
    Learned,
    Llama3Scaling,
    ModelConfig,
    NoFeedForward,
    NoMixer,
    NoNorm,
    NoOutput,
    NoPosition,
    NTKScaling,
    Parallel,
    Pattern,
    Pooling,
    Position,
    PositionMixing,
    Projected,
    Recurrent,
    RMSNorm,
    Rotary,
    Sequential,
    Sinusoidal,
    Special,
    SqrtWidth,
    Stack,
    T5Bias,
    Times,
    Tokens,
    Unscaled,
    Window,
    YarnScaling,
)
from anyformer.config.spec import members
from anyformer.nn.model import Transformer
from tests.feedforwards import feedforwards
from tests.state_mixers import STATE_MIXERS

WIDTH, VOCAB, LENGTH = 8, 11, 24
HERE = Layout(torch.zeros(1, 1, dtype=torch.long))  # for layers that do not look at it

RELATIVE: tuple[Position, ...] = (
    NoPosition(),
    Alibi(),
    T5Bias(buckets=8, max_distance=12),
    T5Bias(buckets=8, max_distance=12, shared=False),
    Disentangled(buckets=6, max_distance=9),
    Disentangled(buckets=7, max_distance=None, terms="content_to_position", projections="separate", norm=NoNorm()),
    Disentangled(buckets=6, max_distance=9, terms="position_to_content", projections="separate"),
    Rotary(theta=100.0),
    Rotary(theta=100.0, fraction=0.5),
    Rotary(theta=100.0, scaling=NTKScaling(factor=2.0)),
    Rotary(theta=100.0, scaling=YarnScaling(factor=4.0, original_length=8)),
    Rotary(theta=100.0, scaling=YarnScaling(factor=4.0, original_length=8, truncate=False)),
    Rotary(theta=100.0, scaling=Llama3Scaling(factor=4.0, original_length=8)),
)
ABSOLUTE: tuple[Position, ...] = (Sinusoidal(), Learned(length=LENGTH), Learned(length=LENGTH, offset=2))
# a scheme that is not named above takes part with its defaults
NEW = tuple(scheme() for scheme in members(Position) if scheme not in map(type, RELATIVE + ABSOLUTE))
RELATIVE += tuple(scheme for scheme in NEW if not scheme.embeds())
ABSOLUTE += tuple(scheme for scheme in NEW if scheme.embeds())
POSITIONS = RELATIVE + ABSOLUTE
# made of distances alone
BACKWARD: tuple[Pattern, ...] = (
    Causal(),
    Window(before=3, after=0),
    Window(before=0, after=0),
    Dilated(before=2, after=0, step=2),
)
BOTH_WAYS: tuple[Pattern, ...] = (
    Full(),
    Window(before=2, after=1),
    Window(before=0, after=2),
    Dilated(before=1, after=2, step=3),
)
# counted from the first position: moving all tokens along changes who sees whom. Both sides take the first ones
EDGES = tuple((q, k) for q in range(LENGTH) for k in range(LENGTH) if (q * q + 3 * k) % 5 == 0)
ANCHORED: tuple[Pattern, ...] = (
    Window(before=1, after=0, globals=2),
    BlockLocal(size=3),
    BigBird(block=2, before=1, after=1, globals=1, randoms=1),
    BigBird(block=1, before=0, after=0, globals=0, randoms=2, seed=5),
    Graph(nodes=LENGTH, edges=EDGES),
    Graph(nodes=LENGTH, edges=EDGES, loops=False),
)
ANCHORED_BOTH_WAYS: tuple[Pattern, ...] = (*ANCHORED, Window(before=1, after=1, globals=1))
PATTERNS = BACKWARD + BOTH_WAYS + ANCHORED_BOTH_WAYS
ACROSS: tuple[Pattern, ...] = (Window(before=2, after=1), Dilated(before=1, after=1, step=2))

# What stands in a block in place of self-attention, and the laws that are not for all of them:
FIXED = ("dense", "positions")  # a weight for each position: moving all tokens along changes what they read
# they know the order of tokens, whether positions tell it or not
ORDERED = ("recurrent", "convolution", *STATE_MIXERS, *FIXED)
MIXERS = ("attention", "none", *ORDERED)


def speaks(config: ModelConfig) -> bool:
    """Whether every token must show in the output: without a residual path a ReLU may silence it."""
    return all(block.residual for stack in config.stacks.values() for block in stack.unrolled())


TABLES = (FullTable(), FullTable(), FactorisedTable(width=4), FactorisedTable(width=4, project="before_position"))

norms = st.sampled_from(
    [
        NoNorm(),
        LayerNorm(),
        LayerNorm(bias=False),
        RMSNorm(),
        RMSNorm(offset=1.0, cast="after_scale"),
        BatchNorm(),
        DynamicTanh(),
    ]
)


@st.composite
def attentions(draw: st.DrawFn, pattern: Pattern | None = None, position: Position | None = None, cross: bool = False):
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    # key width 4 or 8: even, and more than one rotated pair even at half rotation
    key_width = draw(st.sampled_from([4, 8]))
    shared = "separate" if cross else draw(st.sampled_from(["separate", "separate", "shared_qk", "shared_qkv"]))
    groups = heads if shared != "separate" else draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0]))
    value_width = key_width if shared == "shared_qkv" else draw(st.sampled_from([None, 2, 5]))
    fits = heads * (value_width or key_width) == WIDTH
    normalizer = draw(st.sampled_from(["softmax", "softmax", "relu"]))
    return Attention(
        heads=heads,
        kv_heads=groups,
        key_width=key_width,
        value_width=value_width,
        projections=shared,
        bias=draw(st.booleans()),
        output=draw(st.sampled_from([Projected(), Projected(bias=True)] + ([NoOutput()] if fits else []))),
        qk_norm=(qk_norm := draw(st.sampled_from([NoNorm(), RMSNorm(), LayerNorm()]))),
        qk_norm_over="head" if qk_norm == NoNorm() else draw(st.sampled_from(["head", "each_head", "projection"])),
        scale=draw(st.sampled_from([InvSqrtKey(), InvSqrtWidth(), Unscaled(), Times(value=0.3)])),
        cap=draw(st.sampled_from([None, None, 1.5])),
        normalizer=normalizer,
        sinks=normalizer == "softmax" and draw(st.booleans()),
        gate=draw(st.sampled_from(["none", "none", "head", "element"])),
        pattern=draw(st.sampled_from([None, None, *ACROSS])) if cross else pattern,
        position=position,
    )


@st.composite
def latents(draw: st.DrawFn, pattern: Pattern | None = None, position: Position | None = None):
    """Latent attention; half of the head turns, and that is more than one pair even at half rotation."""
    position = None if position is not None and position.reads_content() else position
    direct = draw(attentions(pattern, position))
    norm = draw(st.sampled_from([NoNorm(), RMSNorm(), LayerNorm()]))
    compress = Latent(rank=3, rotary_width=4, query_rank=draw(st.sampled_from([None, 5])), norm=norm)
    update = {"compress": compress, "key_width": 8, "kv_heads": None, "projections": "separate"}
    update |= {"qk_norm": NoNorm(), "qk_norm_over": "head"}
    return direct.model_copy(update=update | {"output": Projected(bias=draw(st.booleans()))})


def recurrents(encoder: bool):
    """Any cell, wider or narrower than d; both ways in an encoder."""
    return st.builds(
        Recurrent,
        cell=st.sampled_from(["rnn", "lstm", "gru"]),
        width=st.sampled_from([None, 5]),
        both_ways=st.booleans() if encoder else st.just(False),
    )


@st.composite
def others(draw: st.DrawFn, kinds: tuple[str, ...], encoder: bool):
    """A mixer of another kind than attention."""
    free = {"causal": st.sampled_from([None, True, False] if encoder else [None, True]), "bias": st.booleans()}
    made = {
        "none": st.just(NoMixer()),
        "recurrent": recurrents(encoder),
        **STATE_MIXERS,
        "convolution": st.builds(Convolution, width=st.integers(1, 4), dilation=st.integers(1, 3), **free),
        "dense": st.builds(FullyConnected, length=st.just(LENGTH), **free),
        "positions": st.builds(PositionMixing, length=st.just(LENGTH), **free),
    }
    return draw(made[draw(st.sampled_from(kinds))])


@st.composite
def blocks(
    draw: st.DrawFn,
    patterns: tuple[Pattern, ...],
    own: tuple[Position | None, ...],
    cross: bool = False,
    mixers: tuple[str, ...] = MIXERS,
    encoder: bool = False,
):
    # half of the layers attend: the product of attention's parts is the greater one
    rest = tuple(kind for kind in mixers if kind != "attention")
    kind = draw(st.sampled_from([attentions, attentions, latents]))
    attention = kind(draw(st.sampled_from(patterns)), draw(st.sampled_from(own)))
    other = rest and ("attention" not in mixers or draw(st.booleans()))
    mixer = draw(others(rest, encoder) if other else attention)
    feedforward = draw(feedforwards)
    empty = isinstance(mixer, NoMixer) and not cross and isinstance(feedforward, NoFeedForward)
    return Block(
        mixer=mixer,
        cross=draw(attentions(cross=True)) if cross else None,
        feedforward=feedforward,
        norm=draw(norms),
        placement=draw(st.sampled_from(["pre", "post", "branch", "sandwich"])),
        order=draw(st.sampled_from([Sequential(), Parallel(), Parallel(shared_norm=True)])),
        residual=empty or draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def stacks(
    draw: st.DrawFn,
    patterns: tuple[Pattern, ...],
    positions: tuple[Position, ...],
    cross: bool = False,
    mixers: tuple[str, ...] = MIXERS,
    encoder: bool = False,
    pools: bool = False,
):
    # a layer may take another scheme than its stack, as long as that acts inside attention
    own = (None, None, *(p for p in positions if not p.embeds()))
    made = blocks(patterns, own, cross, mixers, encoder)
    layers, prefix = (tuple(draw(st.lists(made, min_size=low, max_size=high))) for low, high in ((1, 2), (0, 1)))
    depth = draw(st.integers(1, 3))
    pooling = draw(poolings(depth)) if pools and depth > 1 and draw(st.booleans()) else None
    if pooling is None and draw(st.booleans()):
        layers, prefix = (_with_first_values(some, (*prefix, *layers)) for some in (layers, prefix))
    found = Stack(
        depth=depth,
        blocks=layers,
        prefix=prefix,
        share=draw(st.booleans()),
        position=_taken(draw(st.sampled_from(positions)), (*prefix, *layers)),
        final_norm=draw(norms),
        pooling=pooling,
        embedding_skip=pooling is None and draw(st.booleans()),
        unet_skips=pooling is None and depth > 1 and draw(st.booleans()),
    )
    return _with_global_projections(found) if encoder and draw(st.booleans()) else found


def _with_global_projections(stack: Stack) -> Stack:
    """The stack of an encoder, with projections of global tokens where a pattern has some, and they fit."""

    def fits(mixer: object) -> bool:
        if not isinstance(mixer, Attention) or not mixer.global_positions or mixer.projections != "separate":
            return False
        content = (mixer.position or stack.position).reads_content()
        return not content and not mixer.value_residual and not isinstance(mixer.compress, Latent)

    def changed(block: Block) -> Block:
        mixer = block.mixer.model_copy(update={"global_projections": True}) if fits(block.mixer) else block.mixer
        return block.model_copy(update={"mixer": mixer})

    return stack.model_copy(update={name: tuple(map(changed, getattr(stack, name))) for name in ("blocks", "prefix")})


def _with_first_values(layers: tuple[Block, ...], every: tuple[Block, ...]) -> tuple[Block, ...]:
    """Layers with a value residual, where their values have the sizes of the first that can have one."""

    def sizes(mixer: object) -> tuple[int, int] | None:
        direct = isinstance(mixer, Attention) and not isinstance(mixer.compress, Latent)
        return (mixer.groups, mixer.widths(WIDTH)[1]) if direct else None

    first = next((found for block in every if (found := sizes(block.mixer))), None)
    return tuple(
        block.model_copy(update={"mixer": block.mixer.model_copy(update={"value_residual": True})})
        if first is not None and sizes(block.mixer) == first
        else block
        for block in layers
    )


@st.composite
def poolings(draw: st.DrawFn, depth: int) -> Pooling:
    """Any stages of so many layers in all."""
    tail = draw(st.integers(0, depth - 2))
    borders = draw(st.lists(st.integers(1, depth - tail - 1), min_size=1, unique=True).map(sorted))
    stages = tuple(b - a for a, b in pairwise([0, *borders, depth - tail]))
    return Pooling(stages=stages, factor=draw(st.integers(1, 3)), how=draw(st.sampled_from(["mean", "max"])), tail=tail)


def _taken(position: Position, layers: tuple[Block, ...]) -> Position:
    """The scheme, or none where it acts inside attention and no layer takes it, or latent attention would."""
    takers = [b.mixer for b in layers if isinstance(b.mixer, Attention) and b.mixer.position is None]
    fits = not position.reads_content() or not any(isinstance(mixer.compress, Latent) for mixer in takers)
    return position if (takers and fits) or position.embeds() else NoPosition()


@st.composite
def handing_over(draw: st.DrawFn, encoder: Stack, decoder: Stack) -> tuple[Stack, Stack]:
    """The stacks with recurrent layers, those of the decoder beginning where the encoder's ended."""
    cell, across = draw(recurrents(encoder=False)), draw(st.booleans())
    give, take = (
        cell.model_copy(update={"both_ways": draw(st.booleans())}),
        cell.model_copy(update={"begin": "encoder"}),
    )

    def filled(stack: Stack, depth: int, mixer: Recurrent, **without: None) -> Stack:
        parts = {
            name: tuple(block.model_copy(update={"mixer": mixer, **without}) for block in getattr(stack, name))
            for name in ("blocks", "prefix")
        }
        position = _taken(stack.position, parts["blocks"])
        other = {"position": position, "pooling": None, "unet_skips": stack.unet_skips and depth > 1}
        return stack.model_copy(update={**parts, "depth": depth, **other})

    depth = min(encoder.depth, decoder.depth)
    return filled(encoder, encoder.depth, give), filled(decoder, depth, take, **({} if across else {"cross": None}))


@st.composite
def models(
    draw: st.DrawFn,
    shapes: tuple[str, ...] = ("decoder", "encoder", "encoder-decoder"),
    positions: tuple[Position, ...] = POSITIONS,
    encoder_patterns: tuple[Pattern, ...] = PATTERNS,
    decoder_patterns: tuple[Pattern, ...] = BACKWARD + ANCHORED,
    mixers: tuple[str, ...] = MIXERS,
    pools: bool = True,
) -> ModelConfig:
    shape = draw(st.sampled_from(shapes))
    both = shape == "encoder-decoder"
    reading = stacks(encoder_patterns, positions, mixers=mixers, encoder=True, pools=pools)
    encoder = draw(reading) if shape != "decoder" else None
    decoder = draw(stacks(decoder_patterns, positions, both, mixers)) if shape != "encoder" else None
    if encoder and decoder and "recurrent" in mixers and not draw(st.integers(0, 3)):
        encoder, decoder = draw(handing_over(encoder, decoder))
    tokens = Tokens(
        vocab=VOCAB,
        table=draw(st.sampled_from(TABLES)),
        types=draw(st.sampled_from([0, 2])),
        scale=draw(st.sampled_from([Unscaled(), SqrtWidth()])),
        norm=draw(norms),
    )
    return ModelConfig(
        width=WIDTH,
        source=tokens if encoder else None,
        target=tokens if decoder else None,
        encoder=encoder,
        decoder=decoder,
        head=LM(bias=draw(st.booleans())),
        tie=draw(st.sampled_from(["none", "output", "inputs", "all"] if both else ["none", "output"])),
        special=Special(pad=0, start=1),
    )


seeds = st.integers(0, 2**16)


def build(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model in eval mode and float64, with weights large enough for every part to show in the output."""
    torch.manual_seed(seed)
    model = Transformer(config).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
        for statistic in model.buffers():  # variances stay positive
            statistic.add_(torch.randn_like(statistic).abs() * 0.4)
    return model


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to rounding, relative to the size of what is compared."""
    size = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * size)
