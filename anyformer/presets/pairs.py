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
from anyformer.presets.family import NEXT_TOKEN, NEXT_TOKEN_SCALED, biased, given, special_ids, tied


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


def t5(
    *,
    depth: int = 6,
    width: int = 512,
    heads: int = 8,
    kv_heads: int | None = None,
    key_width: int = 64,
    ff: int | None = None,
    vocab: int = 32_128,
    dropout: float = 0.1,
    head: Head = NEXT_TOKEN_SCALED,
) -> ModelConfig:
    """T5 small, 61 M (Raffel et al. 2020): pre-norm with RMS norms, no biases, relative positions, all weights tied."""
    norm = RMSNorm(eps=1e-6)
    attention = Attention(heads=heads, kv_heads=kv_heads, key_width=key_width, scale=Unscaled(), dropout=dropout)
    feedforward = Plain(width=ff, activation=Relu(), bias=False, dropout=dropout)
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=T5Bias(), final_norm=norm, dropout=dropout)
    tokens = Tokens(vocab=vocab, dropout=dropout)  # no zero row for pad: the decoder starts from it
    return _pair(width, tokens, stack, head, FanIn(), special_ids(vocab, pad=0, eos=1, start=0))


def bart(
    *,
    depth: int = 6,
    width: int = 768,
    heads: int = 12,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 50_265,
    length: int = 1024,
    dropout: float = 0.1,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """BART base, 139 M (Lewis et al. 2020): post-norm, learned positions, normed embeddings, all weights tied."""
    attention = biased(heads, kv_heads, key_width, dropout)
    feedforward = Plain(width=ff, activation=Gelu(), dropout=dropout)
    block = Block(mixer=attention, feedforward=feedforward, placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length, offset=2))
    tokens = Tokens(vocab=vocab, norm=LayerNorm(), dropout=dropout, pad=1)
    return _pair(width, tokens, stack, head, Normal(), special_ids(vocab, pad=1, bos=0, eos=2, start=2))


def whisper(
    *,
    depth: int = 4,
    width: int = 384,
    heads: int = 6,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 51_865,
    mels: int = 80,
    length: int = 448,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """Whisper tiny, 37 M (Radford et al. 2022): an encoder of log-mel frames and a decoder of text, pre-norm.

    Keys have a bias here and none as published: it is without effect, and left out in an export.
    """
    attention = biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=Gelu(), dropout=dropout), dropout=dropout)
    return ModelConfig(
        width=width,
        source=Audio(mels=mels, dropout=dropout),
        target=Tokens(vocab=vocab, dropout=dropout),
        encoder=Stack(
            depth=depth,
            blocks=(block,),
            position=Sinusoidal(layout="halves", closed=True),
            final_norm=LayerNorm(),
        ),
        decoder=Stack(
            depth=depth,
            blocks=(block.model_copy(update={"cross": attention}),),
            position=Learned(length=length),
            final_norm=LayerNorm(),
        ),
        head=head,
        tie=tied(head),
        special=special_ids(vocab, pad=50_257, bos=50_257, eos=50_257, start=50_258),
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
