"""Random specs, drawn from the grammar itself: a part that enters it is in these tests at once. Imports no torch."""

import types
import typing
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from anyformer.config import (
    LM,
    Attention,
    AudioSegment,
    AxialRotary,
    Block,
    Convolution,
    ConvStem,
    Disentangled,
    Embedder,
    Experts,
    FeatureSegment,
    FullyConnected,
    Gated,
    GatedDelta,
    Graph,
    ImageSegment,
    Latent,
    Learned,
    LearnedGrid,
    LinearAttention,
    Llama3Scaling,
    LongRopeScaling,
    Mamba2,
    MaskedLM,
    Media,
    ModelConfig,
    NoCompression,
    NoFeedForward,
    NoMixer,
    NoNorm,
    NoOutput,
    NoPosition,
    NoScaling,
    NoSpelling,
    Plain,
    Position,
    PositionMixing,
    Projected,
    Recurrent,
    Rotary,
    RotaryScheme,
    SigmoidTopK,
    Sinusoidal,
    SoftmaxTopK,
    Spec,
    Special,
    Stack,
    T5Bias,
    Tokens,
)

S = TypeVar("S", bound=Spec)
MEDIA = (
    None,
    Media(image=ImageSegment(image_height=8, patch=4, stem=ConvStem(), position=LearnedGrid()), types=False),
    Media(audio=AudioSegment(mels=4), features=FeatureSegment(size=2)),
)


def _leaves(cls: type[Spec]) -> list[type[Spec]]:
    below = cls.__subclasses__()
    return [leaf for each in below for leaf in _leaves(each)] if below else [cls]


# All specs of models that carry a kind, that is, every alternative; whatever else was imported before.
ALTERNATIVES = sorted(
    (cls for cls in _leaves(Spec) if "kind" in cls.model_fields and cls.__module__.startswith("anyformer.config.")),
    key=lambda cls: cls.__name__,
)


def specs(cls: type[S], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[S]:
    """Specs of a class with every field drawn by its type; valid by themselves, not yet beside others."""
    if cls is Graph:  # its edges join nodes that are there
        fixed = {"nodes": st.integers(4, 9), "edges": st.lists(st.tuples(*[st.integers(0, 3)] * 2)).map(tuple)} | fixed
    if cls is Embedder:  # a learned scale is one of cosines
        fixed = {"normalize": st.just(True)} | fixed
    if cls is Tokens:  # segments fit the model's width
        fixed = {"media": st.sampled_from(MEDIA)} | fixed
    fields = {name: fixed[name] if name in fixed else _field(cls, name) for name in cls.model_fields}
    return st.builds(cls, **fields)


@cache  # strategies are slow to make and quick to draw from
def _field(cls: type[Spec], name: str) -> st.SearchStrategy[Any]:
    return _values(_whole(cls.model_fields[name]))


def _whole(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _values(annotation: Any, *limits: Any) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        opened = [m for limit in args[1:] for m in (limit.metadata if isinstance(limit, FieldInfo) else [limit])]
        return _values(args[0], *limits, *opened)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(_values, args))
    if origin is tuple and ... not in args:
        return st.tuples(*map(_values, args))
    if origin is tuple:
        return st.lists(_values(args[0]), min_size=1, max_size=2).map(tuple)
    if origin is Literal:
        return st.sampled_from(args)
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    low: Any = next((m.ge for m in limits if isinstance(m, Ge)), None)
    above: Any = next((m.gt for m in limits if isinstance(m, Gt)), None)
    high: Any = next((m.le for m in limits if isinstance(m, Le)), None)
    below: Any = next((m.lt for m in limits if isinstance(m, Lt)), None)
    if annotation is int:
        return st.integers(low, high)
    if annotation is str:
        return st.text(st.characters(exclude_categories=["Cs"]))
    if annotation is float:
        return st.floats(
            above if low is None else low,
            below if high is None else high,
            exclude_min=above is not None,
            exclude_max=below is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    assert issubclass(annotation, Spec), f"no strategy for {annotation}"
    return st.one_of(*map(specs, annotation.choices()))


# -- whole models: the rules between parts kept -----------------------------------------------------------------------

WIDTH, VOCAB = 24, 50
scalings = st.one_of(
    specs(Llama3Scaling, low_frequency=st.floats(0.5, 2), high_frequency=st.floats(3, 8)),
    *(
        specs(cls)
        for cls in ALTERNATIVES
        # not LongRoPE, whose factors are as many as a head has pairs
        if cls.__name__.endswith("Scaling") and cls not in (Llama3Scaling, LongRopeScaling)
    ),
)
inside = st.one_of(  # schemes that act inside attention; key widths are 4 and 8
    specs(Rotary, fraction=st.sampled_from([1.0, 1]), scaling=scalings),
    specs(Rotary, fraction=st.just(0.5), scaling=specs(NoScaling)),
    specs(T5Bias, buckets=st.sampled_from([4, 32]), max_distance=st.integers(17, 200)),
    specs(AxialRotary, fraction=st.just(1.0), scaling=scalings),
    *(specs(c) for c in Position.__subclasses__() if c not in (RotaryScheme, T5Bias, Disentangled) and not c.embeds()),
    specs(Disentangled, buckets=st.integers(2, 30), max_distance=st.none() | st.integers(17, 200)),
)
nothing = st.none()
ids = nothing | st.integers(0, VOCAB - 1)
sizes = st.sampled_from([(3, None), (3, 8), (6, None), (6, 4), (5, 4)])  # heads and key width
free = {"heads": st.just(1), "kv_heads": nothing, "key_width": nothing, "value_width": nothing}
free["compress"] = specs(NoCompression)
free["global_projections"] = st.just(False)  # of encoders alone: tests/nn/test_global_tokens.py
self_attention = specs(Attention, **free, output=specs(Projected), position=nothing | inside)
cross_attention = specs(Attention, **free, projections=st.just("separate"), output=specs(Projected), position=nothing)


@st.composite
def attentions(draw: st.DrawFn, cross: bool = False) -> Attention:
    spec = draw(cross_attention if cross else self_attention)
    heads, key_width = draw(sizes)
    value_width = None if spec.projections == "shared_qkv" else draw(st.sampled_from([None, 7]))
    groups = draw(st.sampled_from([None, 1, heads])) if spec.projections == "separate" else None
    whole = heads * (value_width or key_width or WIDTH // heads) == WIDTH
    output = NoOutput() if whole and draw(st.booleans()) else spec.output
    update = {"heads": heads, "kv_heads": groups, "key_width": key_width, "value_width": value_width, "output": output}
    update["sinks"] = spec.sinks and spec.normalizer == "softmax"
    update["qk_norm_over"] = "head" if isinstance(spec.qk_norm, NoNorm) else spec.qk_norm_over
    update["value_residual"] = spec.value_residual and not cross
    content = spec.position is not None and spec.position.reads_content()
    if not cross and not content and spec.projections == "separate" and key_width == 8 and draw(st.booleans()):
        update |= {"compress": draw(specs(Latent, rotary_width=st.just(4))), "kv_heads": None}
        update |= {"qk_norm": NoNorm(), "qk_norm_over": "head", "value_residual": False}
    return spec.model_copy(update=update)


others = st.one_of(  # mixers that fit an encoder and a decoder alike
    specs(NoMixer),
    specs(Recurrent, both_ways=st.just(False), begin=st.just("zero")),
    specs(LinearAttention, heads=st.just(2), features=st.just("elu")),
    specs(Mamba2, heads=st.just(4), groups=st.sampled_from([1, 2])),
    specs(GatedDelta, heads=st.just(4), key_heads=st.sampled_from([None, 2])),
    *(specs(kind, causal=st.sampled_from([None, True])) for kind in (Convolution, FullyConnected, PositionMixing)),
)


groups = {"groups": st.just(4), "top_groups": st.integers(2, 4)}
routers = specs(SoftmaxTopK, **groups) | specs(SigmoidTopK, **groups)
feedforwards = st.one_of(
    *(specs(kind) for kind in (NoFeedForward, Plain, Gated)),
    specs(Experts, count=st.just(8), top_k=st.integers(1, 4), router=routers, shared=st.integers(1, 4)),
    specs(Experts, count=st.just(8), top_k=st.just(2), router=routers, shared=st.just(0), shared_gate=st.just(False)),
)


def stacks(cross: bool) -> st.SearchStrategy[Stack]:
    crossing = attentions(cross=True) if cross else nothing
    block = specs(Block, mixer=attentions() | others, cross=crossing, feedforward=feedforwards).map(_passing)
    return (
        specs(
            Stack,
            depth=st.integers(1, 99),
            blocks=st.lists(block, min_size=1, max_size=2).map(tuple),
            prefix=st.lists(block, max_size=1).map(tuple),
            position=inside | specs(Sinusoidal) | specs(Learned),
            memory=st.just(0),  # these two are for some shapes alone, and have tests of their own
            pooling=nothing,
        )
        .map(_taken)
        .map(_skipping)
    )


def _passing(block: Block) -> Block:
    """The block, with a residual path where nothing else would pass on its input."""
    empty = block.mixer.kind == "none" and not block.cross and block.feedforward.kind == "none"
    return block.model_copy(update={"residual": True}) if empty else block


def _taken(stack: Stack) -> Stack:
    """The stack, without positions where they act inside attention and no layer takes them, or one that cannot."""
    mixers = [block.mixer for block in (*stack.prefix, *stack.blocks)]
    takers = [mixer for mixer in mixers if isinstance(mixer, Attention) and mixer.position is None]
    taken = takers and not (stack.position.reads_content() and any(a.compress.kind == "latent" for a in takers))
    return stack if taken or stack.position.embeds() else stack.model_copy(update={"position": NoPosition()})


def _skipping(stack: Stack) -> Stack:
    """The stack, with skips for which it is deep enough, and residuals of values of one size."""
    sizes = [
        (block.mixer.groups, block.mixer.widths(WIDTH)[1])
        for block in (*stack.prefix, *stack.blocks)
        if isinstance(block.mixer, Attention) and block.mixer.value_residual
    ]

    def plain(block: Block) -> Block:
        if not isinstance(block.mixer, Attention):
            return block
        return block.model_copy(update={"mixer": block.mixer.model_copy(update={"value_residual": False})})

    update: dict[str, Any] = {"unet_skips": stack.unet_skips and stack.depth > 1}
    if len(set(sizes)) > 1:
        update |= {name: tuple(map(plain, getattr(stack, name))) for name in ("prefix", "blocks")}
    return stack.model_copy(update=update)


alone, reading = stacks(cross=False), stacks(cross=True)
shapes = st.one_of(st.tuples(alone, nothing), st.tuples(nothing, alone), st.tuples(alone, reading))
inputs = specs(Tokens, vocab=st.just(VOCAB), pad=ids)
others = st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple)
specials = specs(Special, pad=ids, bos=ids, eos=ids, start=ids, stops=others)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    encoder, decoder = draw(shapes)
    tokens, head = draw(inputs), draw(_field(ModelConfig, "head"))
    if encoder and decoder:  # which read no spelled words
        tokens = tokens.model_copy(update={"spelling": NoSpelling()})
    ties = ["none"] + ["output"] * isinstance(head, (LM, MaskedLM)) + ["inputs"] * bool(encoder and decoder)
    return ModelConfig(
        width=WIDTH,
        source=tokens if encoder else None,
        target=tokens if decoder else None,
        encoder=encoder,
        decoder=decoder,
        head=head,
        tie=draw(st.sampled_from(ties)),
        init=draw(_field(ModelConfig, "init")),
        special=draw(specials),
        context=draw(_field(ModelConfig, "context")),
    )
