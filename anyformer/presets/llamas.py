"""Llama and related decoders: RMS norms, rotary positions, gated feed-forwards. Imports no torch."""

from anyformer.config import (
    LM,
    Attention,
    Block,
    Experts,
    Gated,
    Head,
    Latent,
    ModelConfig,
    RMSNorm,
    Rotary,
    SoftmaxTopK,
    SqrtWidth,
    Stack,
    Tokens,
    Window,
)
from anyformer.presets.family import GELU_TANH, NEXT_TOKEN, given, groups, special_ids, tied

GEMMA_NORM = RMSNorm(eps=1e-6, offset=1.0, cast="after_scale")
NEXT_TOKEN_CAPPED = LM(cap=30.0)


def llama(
    *,
    depth: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 32_000,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """Llama 2, 7 B (Touvron et al. 2023): pre-norm decoder with RMS norms, rotary, SwiGLU, no biases."""
    norm = RMSNorm(eps=1e-5)
    attention = Attention(heads=heads, kv_heads=kv_heads, key_width=key_width, dropout=dropout)
    two_thirds = -(-8 * width // (3 * 256)) * 256  # of 4 d, up to a multiple of 256: three matrices weigh as two did
    block = Block(mixer=attention, feedforward=Gated(width=given(ff, two_thirds)), norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, special=special_ids(vocab, bos=1, eos=2))


def mistral(
    *,
    depth: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 32_000,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """Mistral v0.1, 7 B (Jiang et al. 2023): Llama with grouped queries and a sliding window of 4,096."""
    norm, window = RMSNorm(eps=1e-5), Window(before=4095, after=0)
    shared = groups(heads, kv_heads, 4)
    attention = Attention(heads=heads, kv_heads=shared, key_width=key_width, pattern=window, dropout=dropout)
    block = Block(mixer=attention, feedforward=Gated(width=given(ff, 7 * width // 2)), norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, special=special_ids(vocab, bos=1, eos=2))


def mixtral(
    *,
    depth: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    experts: int = 8,
    top_k: int = 2,
    vocab: int = 32_000,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """Mixtral, 8x7 B (Jiang et al. 2024): Mistral without its window, in which two experts of eight read each token."""
    norm = RMSNorm(eps=1e-5)
    attention = Attention(heads=heads, kv_heads=groups(heads, kv_heads, 4), key_width=key_width, dropout=dropout)
    expert = Gated(width=given(ff, 7 * width // 2))
    feedforward = Experts(count=experts, top_k=top_k, expert=expert, balance=0.02)
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(theta=1e6), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, special=special_ids(vocab, bos=1, eos=2))


def qwen3(
    *,
    depth: int = 28,
    width: int = 1024,
    heads: int = 16,
    kv_heads: int | None = None,
    key_width: int = 128,
    ff: int | None = None,
    vocab: int = 151_936,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """Qwen3, 0.6 B (Qwen team 2025): grouped queries, norms on queries and keys, heads wider than d / h, tied."""
    norm = RMSNorm(eps=1e-6)
    shared = groups(heads, kv_heads, 2)
    attention = Attention(heads=heads, kv_heads=shared, key_width=key_width, qk_norm=norm, dropout=dropout)
    block = Block(mixer=attention, feedforward=Gated(width=given(ff, 3 * width)), norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(theta=1e6), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    ids = special_ids(vocab, bos=151_643, eos=151_645)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=tied(head), special=ids)


def gemma(
    *,
    depth: int = 18,
    width: int = 2048,
    heads: int = 8,
    kv_heads: int | None = None,
    key_width: int = 256,
    ff: int | None = None,
    vocab: int = 256_000,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """Gemma 1, 2 B (Gemma team 2024): one key/value head, GEGLU, embeddings scaled by sqrt(d), tied."""
    attention = Attention(heads=heads, kv_heads=groups(heads, kv_heads, 8), key_width=key_width, dropout=dropout)
    feedforward = Gated(width=given(ff, 8 * width), activation=GELU_TANH)
    block = Block(mixer=attention, feedforward=feedforward, norm=GEMMA_NORM, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(), final_norm=GEMMA_NORM)
    return _gemma(width, vocab, stack, head, dropout)


def gemma2(
    *,
    depth: int = 26,
    width: int = 2304,
    heads: int = 8,
    kv_heads: int | None = None,
    key_width: int = 256,
    ff: int | None = None,
    vocab: int = 256_000,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN_CAPPED,
) -> ModelConfig:
    """Gemma 2, 2 B (Gemma team 2024): sandwich norms, capped scores and logits, a window in every other layer."""
    shared = groups(heads, kv_heads, 2)
    full = Attention(heads=heads, kv_heads=shared, key_width=key_width, cap=50.0, dropout=dropout)
    local = full.model_copy(update={"pattern": Window(before=4095, after=0)})
    stack = _sandwiched(depth, (local, full), given(ff, 4 * width), Rotary(), dropout)
    return _gemma(width, vocab, stack, head, dropout)


def gemma3(
    *,
    depth: int = 26,
    width: int = 1152,
    heads: int = 4,
    kv_heads: int | None = None,
    key_width: int = 256,
    ff: int | None = None,
    vocab: int = 262_144,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """Gemma 3, 1 B (Gemma team 2025): sandwich norms, q/k norms; five layers with a window of 512 to each full one."""
    shared = groups(heads, kv_heads, 4)
    full = Attention(heads=heads, kv_heads=shared, key_width=key_width, qk_norm=GEMMA_NORM, dropout=dropout)
    local = full.model_copy(update={"pattern": Window(before=511, after=0), "position": Rotary(theta=1e4)})
    stack = _sandwiched(depth, (*[local] * 5, full), given(ff, 6 * width), Rotary(theta=1e6), dropout)
    return _gemma(width, vocab, stack, head, dropout)


def deepseek(
    *,
    depth: int = 27,
    width: int = 2048,
    heads: int = 16,
    key_width: int = 192,
    ff: int | None = None,
    experts: int = 64,
    top_k: int = 6,
    vocab: int = 102_400,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """DeepSeek-V2-Lite, 16 B (DeepSeek-AI 2024): keys and values from a latent vector, 6 of 64 experts and 2 shared.

    `ff` is each expert's; a third of a head is rotary. As first trained, before its context was stretched by YaRN.
    """
    norm = RMSNorm(eps=1e-6)
    turning = key_width // 3
    latent = Latent(rank=width // 4, rotary_width=turning, norm=norm)
    attention = Attention(
        heads=heads, key_width=key_width, value_width=key_width - turning, compress=latent, dropout=dropout
    )
    expert, router = Gated(width=given(ff, 11 * width // 16)), SoftmaxTopK(normalize=False)
    mixture = Experts(count=experts, top_k=top_k, router=router, expert=expert, shared=2, balance=0.001)
    block = Block(mixer=attention, feedforward=mixture, norm=norm, dropout=dropout)
    dense = block.model_copy(update={"feedforward": Gated(width=171 * width // 32)})
    stack = Stack(depth=depth, prefix=(dense,), blocks=(block,), position=Rotary(), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    ids = special_ids(vocab, bos=100_000, eos=100_001)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, special=ids)


def _sandwiched(depth: int, tile: tuple[Attention, ...], ff: int, position: Rotary, dropout: float) -> Stack:
    feedforward = Gated(width=ff, activation=GELU_TANH)
    blocks = [
        Block(mixer=attention, feedforward=feedforward, norm=GEMMA_NORM, placement="sandwich", dropout=dropout)
        for attention in tile
    ]
    return Stack(depth=depth, blocks=tuple(blocks), position=position, final_norm=GEMMA_NORM)


def _gemma(width: int, vocab: int, stack: Stack, head: Head, dropout: float) -> ModelConfig:
    tokens = Tokens(vocab=vocab, scale=SqrtWidth(), dropout=dropout)
    ids = special_ids(vocab, pad=0, bos=2, eos=1)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=tied(head), special=ids)
