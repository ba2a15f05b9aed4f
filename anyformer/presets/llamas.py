"""Llama and related decoders: RMS norms, rotary positions, gated feed-forwards. Imports no torch."""

from anyformer.config import (
    LM,
    Attention,
    Experts,
    Gated,
    Latent,
    ModelConfig,
    RMSNorm,
    Rotary,
    SoftmaxTopK,
    SqrtWidth,
    Stack,
    Window,
)
from anyformer.presets.family import GELU_TANH, Arguments, given, preset

GEMMA_NORM = RMSNorm(eps=1e-6, offset=1.0, cast="after_scale")
NEXT_TOKEN_CAPPED = LM(cap=30.0)


@preset(depth=32, width=4096, heads=32, vocab=32_000)
def llama(size: Arguments) -> ModelConfig:
    """Llama 2, 7 B (Touvron et al. 2023): pre-norm decoder with RMS norms, rotary, SwiGLU, no biases."""
    norm = RMSNorm(eps=1e-5)
    # of 4 d, up to a multiple of 256: three matrices weigh as two did
    two_thirds = -(-8 * size.width // (3 * 256)) * 256
    block = size.block(size.attention(), Gated(width=given(size.ff, two_thirds)), norm=norm)
    stack = size.stack(block, position=Rotary(), final_norm=norm)
    return size.decoder(stack, tie=False, special=size.ids(bos=1, eos=2))


@preset(depth=32, width=4096, heads=32, vocab=32_000)
def mistral(size: Arguments) -> ModelConfig:
    """Mistral v0.1, 7 B (Jiang et al. 2023): Llama with grouped queries and a sliding window of 4,096."""
    norm = RMSNorm(eps=1e-5)
    attention = size.grouped(4, pattern=Window(before=4095, after=0))
    block = size.block(attention, Gated(width=given(size.ff, 7 * size.width // 2)), norm=norm)
    stack = size.stack(block, position=Rotary(), final_norm=norm)
    return size.decoder(stack, tie=False, special=size.ids(bos=1, eos=2))


@preset(depth=32, width=4096, heads=32, experts=8, top_k=2, vocab=32_000)
def mixtral(size: Arguments) -> ModelConfig:
    """Mixtral, 8x7 B (Jiang et al. 2024): Mistral without its window, in which two experts of eight read each token."""
    norm, expert = RMSNorm(eps=1e-5), Gated(width=given(size.ff, 7 * size.width // 2))
    experts = Experts(count=size.experts, top_k=size.top_k, expert=expert, balance=0.02)
    stack = size.stack(size.block(size.grouped(4), experts, norm=norm), position=Rotary(theta=1e6), final_norm=norm)
    return size.decoder(stack, tie=False, special=size.ids(bos=1, eos=2))


@preset(depth=28, width=1024, heads=16, key_width=128, vocab=151_936)
def qwen3(size: Arguments) -> ModelConfig:
    """Qwen3, 0.6 B (Qwen team 2025): grouped queries, norms on queries and keys, heads wider than d / h, tied."""
    norm = RMSNorm(eps=1e-6)
    block = size.block(size.grouped(2, qk_norm=norm), Gated(width=given(size.ff, 3 * size.width)), norm=norm)
    stack = size.stack(block, position=Rotary(theta=1e6), final_norm=norm)
    return size.decoder(stack, special=size.ids(bos=151_643, eos=151_645))


@preset(depth=18, width=2048, heads=8, key_width=256, vocab=256_000)
def gemma(size: Arguments) -> ModelConfig:
    """Gemma 1, 2 B (Gemma team 2024): one key/value head, GEGLU, embeddings scaled by sqrt(d), tied."""
    feedforward = Gated(width=given(size.ff, 8 * size.width), activation=GELU_TANH)
    block = size.block(size.grouped(8), feedforward, norm=GEMMA_NORM)
    return _gemma(size, size.stack(block, position=Rotary(), final_norm=GEMMA_NORM))


@preset(depth=26, width=2304, heads=8, key_width=256, vocab=256_000, head=NEXT_TOKEN_CAPPED)
def gemma2(size: Arguments) -> ModelConfig:
    """Gemma 2, 2 B (Gemma team 2024): sandwich norms, capped scores and logits, a window in every other layer."""
    full = size.grouped(2, cap=50.0)
    local = full.model_copy(update={"pattern": Window(before=4095, after=0)})
    return _gemma(size, _sandwiched(size, (local, full), given(size.ff, 4 * size.width), Rotary()))


@preset(depth=26, width=1152, heads=4, key_width=256, vocab=262_144)
def gemma3(size: Arguments) -> ModelConfig:
    """Gemma 3, 1 B (Gemma team 2025): sandwich norms, q/k norms; five layers with a window of 512 to each full one."""
    full = size.grouped(4, qk_norm=GEMMA_NORM)
    local = full.model_copy(update={"pattern": Window(before=511, after=0), "position": Rotary(theta=1e4)})
    tile = *[local] * 5, full
    return _gemma(size, _sandwiched(size, tile, given(size.ff, 6 * size.width), Rotary(theta=1e6)))


@preset(depth=27, width=2048, heads=16, key_width=192, experts=64, top_k=6, vocab=102_400, fixed=("kv_heads",))
def deepseek(size: Arguments) -> ModelConfig:
    """DeepSeek-V2-Lite, 16 B (DeepSeek-AI 2024): keys and values from a latent vector, 6 of 64 experts and 2 shared.

    `ff` is each expert's; a third of a head is rotary. As first trained, before its context was stretched by YaRN.
    """
    norm, key = RMSNorm(eps=1e-6), given(size.key_width, 192)
    latent = Latent(rank=size.width // 4, rotary_width=key // 3, norm=norm)
    attention = size.attention(value_width=key - key // 3, compress=latent)
    expert, router = Gated(width=given(size.ff, 11 * size.width // 16)), SoftmaxTopK(normalize=False)
    mixture = Experts(count=size.experts, top_k=size.top_k, router=router, expert=expert, shared=2, balance=0.001)
    block = size.block(attention, mixture, norm=norm)
    dense = block.model_copy(update={"feedforward": Gated(width=171 * size.width // 32)})
    stack = size.stack(block, prefix=(dense,), position=Rotary(), final_norm=norm)
    return size.decoder(stack, tie=False, special=size.ids(bos=100_000, eos=100_001))


def _sandwiched(size: Arguments, tile: tuple[Attention, ...], ff: int, position: Rotary) -> Stack:
    feedforward = Gated(width=ff, activation=GELU_TANH)
    blocks = (size.block(attention, feedforward, norm=GEMMA_NORM, placement="sandwich") for attention in tile)
    return size.stack(*blocks, position=position, final_norm=GEMMA_NORM)


def _gemma(size: Arguments, stack: Stack) -> ModelConfig:
    return size.decoder(stack, tokens=size.tokens(scale=SqrtWidth()), special=size.ids(pad=0, bos=2, eos=1))
