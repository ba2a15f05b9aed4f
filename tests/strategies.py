"""Random small models over the product of the parts, for the laws."""

import torch
from hypothesis import strategies as st

from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    Causal,
    FactorisedTable,
    Full,
    FullTable,
    Gated,
    Gelu,
    InvSqrtKey,
    InvSqrtWidth,
    LayerNorm,
    Learned,
    Llama3Scaling,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    NoOutput,
    NoPosition,
    NTKScaling,
    Parallel,
    Pattern,
    Plain,
    Position,
    Projected,
    Relu,
    RMSNorm,
    Rotary,
    Sequential,
    Silu,
    Sinusoidal,
    Special,
    SqrtWidth,
    SquaredRelu,
    Stack,
    T5Bias,
    Times,
    Tokens,
    Unscaled,
    Window,
    YarnScaling,
)
from anyformer.config.spec import members
from anyformer.nn.mask import Layout
from anyformer.nn.model import Transformer

WIDTH, VOCAB, LENGTH = 8, 11, 24
HERE = Layout(torch.zeros(1, 1, dtype=torch.long))  # for layers that do not look at it

RELATIVE: tuple[Position, ...] = (
    NoPosition(),
    Alibi(),
    T5Bias(buckets=8, max_distance=12),
    T5Bias(buckets=8, max_distance=12, shared=False),
    Rotary(theta=100.0),
    Rotary(theta=100.0, fraction=0.5),
    Rotary(theta=100.0, scaling=NTKScaling(factor=2.0)),
    Rotary(theta=100.0, scaling=YarnScaling(factor=4.0, original_length=8)),
    Rotary(theta=100.0, scaling=Llama3Scaling(factor=4.0, original_length=8)),
)
ABSOLUTE: tuple[Position, ...] = (Sinusoidal(), Learned(length=LENGTH), Learned(length=LENGTH, offset=2))
# a scheme that is not named above takes part with its defaults
NEW = tuple(scheme() for scheme in members(Position) if scheme not in map(type, RELATIVE + ABSOLUTE))
RELATIVE += tuple(scheme for scheme in NEW if not scheme.embeds())
ABSOLUTE += tuple(scheme for scheme in NEW if scheme.embeds())
POSITIONS = RELATIVE + ABSOLUTE
BACKWARD: tuple[Pattern, ...] = (Causal(), Window(before=3, after=0), Window(before=0, after=0))
BOTH_WAYS: tuple[Pattern, ...] = (Full(), Window(before=2, after=1), Window(before=0, after=2))

TABLES = (FullTable(), FullTable(), FactorisedTable(width=4), FactorisedTable(width=4, project="before_position"))

norms = st.sampled_from(
    [NoNorm(), LayerNorm(), LayerNorm(bias=False), RMSNorm(), RMSNorm(offset=1.0, cast="after_scale")]
)
activations = st.sampled_from([Relu(), Gelu(), Gelu(approximate="tanh"), Silu(), SquaredRelu()])
feedforwards = st.one_of(
    st.just(NoFeedForward()),
    st.builds(Plain, width=st.sampled_from([None, 5]), activation=activations, bias=st.booleans()),
    st.builds(Gated, width=st.sampled_from([None, 5]), activation=activations, bias=st.booleans()),
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
    return Attention(
        heads=heads,
        kv_heads=groups,
        key_width=key_width,
        value_width=value_width,
        projections=shared,
        bias=draw(st.booleans()),
        output=draw(st.sampled_from([Projected(), Projected(bias=True)] + ([NoOutput()] if fits else []))),
        qk_norm=draw(st.sampled_from([NoNorm(), RMSNorm(), LayerNorm()])),
        scale=draw(st.sampled_from([InvSqrtKey(), InvSqrtWidth(), Unscaled(), Times(value=0.3)])),
        normalizer=draw(st.sampled_from(["softmax", "softmax", "relu"])),
        pattern=pattern,
        position=position,
    )


@st.composite
def blocks(draw: st.DrawFn, patterns: tuple[Pattern, ...], own: tuple[Position | None, ...], cross: bool = False):
    return Block(
        mixer=draw(attentions(draw(st.sampled_from(patterns)), draw(st.sampled_from(own)))),
        cross=draw(attentions(cross=True)) if cross else None,
        feedforward=draw(feedforwards),
        norm=draw(norms),
        placement=draw(st.sampled_from(["pre", "post", "branch", "sandwich"])),
        order=draw(st.sampled_from([Sequential(), Parallel(), Parallel(shared_norm=True)])),
    )


@st.composite
def stacks(draw: st.DrawFn, patterns: tuple[Pattern, ...], positions: tuple[Position, ...], cross: bool = False):
    # a layer may take another scheme than its stack, as long as that acts inside attention
    own = (None, None, *(p for p in positions if not p.embeds()))
    made = blocks(patterns, own, cross)
    return Stack(
        depth=draw(st.integers(1, 3)),
        blocks=tuple(draw(st.lists(made, min_size=1, max_size=2))),
        prefix=tuple(draw(st.lists(made, max_size=1))),
        share=draw(st.booleans()),
        position=draw(st.sampled_from(positions)),
        final_norm=draw(norms),
    )


@st.composite
def models(
    draw: st.DrawFn,
    shapes: tuple[str, ...] = ("decoder", "encoder", "encoder-decoder"),
    positions: tuple[Position, ...] = POSITIONS,
    encoder_patterns: tuple[Pattern, ...] = BOTH_WAYS + BACKWARD,
    decoder_patterns: tuple[Pattern, ...] = BACKWARD,
) -> ModelConfig:
    shape = draw(st.sampled_from(shapes))
    both = shape == "encoder-decoder"
    encoder = draw(stacks(encoder_patterns, positions)) if shape != "decoder" else None
    decoder = draw(stacks(decoder_patterns, positions, cross=both)) if shape != "encoder" else None
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
    return model


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to rounding, relative to the size of what is compared."""
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max().clamp(min=1)))
