"""Encoder–decoders. Imports no torch."""

from typing import Literal

from anyformer.config import (
    Attention,
    Audio,
    Block,
    ConfigError,
    FanIn,
    Fault,
    Gelu,
    Head,
    Init,
    LayerNorm,
    Learned,
    ModelConfig,
    Normal,
    Plain,
    Relu,
    RMSNorm,
    Sinusoidal,
    Special,
    SqrtWidth,
    Stack,
    T5Bias,
    Tokens,
    Unscaled,
    Xavier,
)
from anyformer.presets.family import NEXT_TOKEN, NEXT_TOKEN_SCALED, Arguments, given, preset, special_ids, tied


def vaswani(
    size: Literal["base", "big"] = "base",
    *,
    depth: int = 6,
    width: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 37_000,
    dropout: float | None = None,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """The 2017 Transformer, base 63 M or big 214 M (Vaswani et al.): post-norm, sinusoidal, all weights tied."""
    if size not in ("base", "big"):
        raise ConfigError([Fault("size", f"= {size!r}: must be 'base' or 'big'")])
    times = 2 if size == "big" else 1
    drop = given(dropout, 0.3 if size == "big" else 0.1)
    attention = Attention(heads=given(heads, 8 * times), kv_heads=kv_heads, key_width=key_width)  # no dropout inside
    norm, feedforward = LayerNorm(eps=1e-6), Plain(width=ff, activation=Relu())
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, placement="post", dropout=drop)
    stack = Stack(depth=depth, blocks=(block,), position=Sinusoidal())
    tokens = Tokens(vocab=vocab, scale=SqrtWidth(), dropout=drop, pad=0)  # ids and eps as in tensor2tensor
    return _pair(given(width, 512 * times), tokens, stack, head, Xavier(), special_ids(vocab, pad=0, eos=1, start=0))


@preset(depth=6, width=512, heads=8, key_width=64, vocab=32_128, dropout=0.1, head=NEXT_TOKEN_SCALED)
def t5(size: Arguments) -> ModelConfig:
    """T5 small, 61 M (Raffel et al. 2020): pre-norm with RMS norms, no biases, relative positions, all weights tied."""
    norm = RMSNorm(eps=1e-6)
    feedforward = Plain(width=size.ff, activation=Relu(), bias=False, dropout=size.dropout)
    block = size.block(size.attention(scale=Unscaled()), feedforward, norm=norm)
    stack = size.stack(block, position=T5Bias(), final_norm=norm, dropout=size.dropout)
    # no zero row for pad: the decoder starts from it
    return _pair(size.width, size.tokens(), stack, size.head, FanIn(), size.ids(pad=0, eos=1, start=0))


@preset(depth=6, width=768, heads=12, vocab=50_265, length=1024, dropout=0.1)
def bart(size: Arguments) -> ModelConfig:
    """BART base, 139 M (Lewis et al. 2020): post-norm, learned positions, normed embeddings, all weights tied."""
    feedforward = Plain(width=size.ff, activation=Gelu(), dropout=size.dropout)
    block = size.block(size.biased(), feedforward, placement="post")
    stack = size.stack(block, position=Learned(length=size.length, offset=2))
    tokens, ids = size.tokens(norm=LayerNorm(), pad=1), size.ids(pad=1, bos=0, eos=2, start=2)
    return _pair(size.width, tokens, stack, size.head, Normal(), ids)


@preset(depth=4, width=384, heads=6, vocab=51_865, mels=80, length=448)
def whisper(size: Arguments) -> ModelConfig:
    """Whisper tiny, 37 M (Radford et al. 2022): an encoder of log-mel frames and a decoder of text, pre-norm.

    Keys have a bias here and none as published: it is without effect, and left out in an export.
    """
    block = size.block(size.biased(), Plain(width=size.ff, activation=Gelu(), dropout=size.dropout))
    reading = block.model_copy(update={"cross": block.mixer})
    return size.decoder(
        size.stack(reading, position=Learned(length=size.length), final_norm=LayerNorm()),
        source=Audio(mels=size.mels, dropout=size.dropout),
        encoder=size.stack(block, position=Sinusoidal(layout="halves", closed=True), final_norm=LayerNorm()),
        special=size.ids(pad=50_257, bos=50_257, eos=50_257, start=50_258),
        context=1500,
    )


def _pair(width: int, tokens: Tokens, encoder: Stack, head: Head, init: Init, special: Special) -> ModelConfig:
    """A decoder like the encoder, with cross-attention like its self-attention, over one vocabulary."""
    reading = tuple(block.model_copy(update={"cross": block.mixer}) for block in encoder.blocks)
    return ModelConfig(
        width=width,
        source=tokens,
        target=tokens,
        encoder=encoder,
        decoder=encoder.model_copy(update={"blocks": reading}),
        head=head,
        tie="all" if tied(head) == "output" else "inputs",
        init=init,
        special=special,
    )
