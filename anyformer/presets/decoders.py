"""Decoders with layer norms. Imports no torch."""

from anyformer.config import (
    Alibi,
    Attention,
    FanIn,
    Gated,
    LayerNorm,
    Learned,
    ModelConfig,
    Normal,
    Parallel,
    Plain,
    Rotary,
    Window,
)
from anyformer.presets.family import GELU_TANH, NEXT_TOKEN_SCALED, Arguments, given, preset


@preset(depth=12, width=768, heads=12, vocab=40_478, length=512, dropout=0.1)
def gpt1(size: Arguments) -> ModelConfig:
    """GPT, 117 M (Radford et al. 2018): post-norm decoder, learned positions, tied."""
    block = size.block(size.biased(), Plain(width=size.ff, activation=GELU_TANH), placement="post")
    return size.decoder(size.stack(block, position=Learned(length=size.length)))


@preset(depth=12, width=768, heads=12, vocab=50_257, length=1024, dropout=0.1)
def gpt2(size: Arguments) -> ModelConfig:
    """GPT-2 small, 124 M (Radford et al. 2019): pre-norm decoder, learned positions, tied."""
    return _gpt(size, size.biased())


@preset(depth=96, width=12_288, heads=96, vocab=50_257, length=2048)
def gpt3(size: Arguments) -> ModelConfig:
    """GPT-3, 175 B (Brown et al. 2020): GPT-2 whose every second layer sees a band of the last 256 tokens.

    The paper gives no width of the band; 256 is that of GPT-Neo, its open counterpart.
    """
    dense = size.biased()
    return _gpt(size, dense, dense.model_copy(update={"pattern": Window(before=255, after=0)}))


def _gpt(size: Arguments, *attentions: Attention) -> ModelConfig:
    blocks = (size.block(attention, Plain(width=size.ff, activation=GELU_TANH)) for attention in attentions)
    stack = size.stack(*blocks, position=Learned(length=size.length), final_norm=LayerNorm())
    return size.decoder(stack, init=Normal(residual=True), special=size.ids(bos=50_256, eos=50_256))


@preset(depth=44, width=6144, heads=64, vocab=50_432)
def neox(size: Arguments) -> ModelConfig:
    """GPT-NeoX, 20 B (Black et al. 2022): attention and feed-forward in parallel, a quarter of each head rotary."""
    block = size.block(size.biased(), Plain(width=size.ff, activation=GELU_TANH), order=Parallel())
    stack = size.stack(block, position=Rotary(fraction=0.25), final_norm=LayerNorm())
    return size.decoder(stack, tie=False, special=size.ids(bos=0, eos=0))


@preset(depth=24, width=1024, heads=16, vocab=250_880)
def bloom(size: Arguments) -> ModelConfig:
    """BLOOM, 560 M (BigScience 2022): pre-norm decoder, ALiBi, normed embeddings, tied."""
    block = size.block(size.biased(), Plain(width=size.ff, activation=GELU_TANH))
    stack = size.stack(block, position=Alibi(), final_norm=LayerNorm())
    return size.decoder(stack, tokens=size.tokens(norm=LayerNorm()), special=size.ids(pad=3, bos=1, eos=2))


@preset(depth=118, width=18_432, heads=48, key_width=256, vocab=256_000, head=NEXT_TOKEN_SCALED)
def palm(size: Arguments) -> ModelConfig:
    """PaLM, 540 B (Chowdhery et al. 2022): parallel sublayers, one key/value head, SwiGLU, rotary, no biases, tied."""
    norm, attention = LayerNorm(bias=False), size.attention(kv_heads=given(size.kv_heads, 1))
    block = size.block(attention, Gated(width=size.ff), norm=norm, order=Parallel(shared_norm=True))
    return size.decoder(size.stack(block, position=Rotary(), final_norm=norm), init=FanIn())
