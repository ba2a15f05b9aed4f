"""Decoders with layer norms. Imports no torch."""

from anyformer.config import (
    Alibi,
    Attention,
    Block,
    FanIn,
    Gated,
    Head,
    LayerNorm,
    Learned,
    ModelConfig,
    Normal,
    Parallel,
    Plain,
    Rotary,
    Stack,
    Tokens,
    Window,
)
from anyformer.presets.family import GELU_TANH, NEXT_TOKEN, NEXT_TOKEN_SCALED, biased, given, special_ids, tied


def gpt1(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 40_478,
    length: int = 512,
    dropout: float = 0.1,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """GPT, 117 M (Radford et al. 2018): post-norm decoder, learned positions, tied."""
    attention = biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=GELU_TANH), placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length))
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=tied(head))


def gpt2(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 50_257,
    length: int = 1024,
    dropout: float = 0.1,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """GPT-2 small, 124 M (Radford et al. 2019): pre-norm decoder, learned positions, tied."""
    attention = biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=GELU_TANH), dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length), final_norm=LayerNorm())
    tokens = Tokens(vocab=vocab, dropout=dropout)
    init, ids = Normal(residual=True), special_ids(vocab, bos=50_256, eos=50_256)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=tied(head), init=init, special=ids)


def gpt3(
    *,
    depth: int = 96,
    width: int = 12_288,
    heads: int = 96,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 50_257,
    length: int = 2048,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """GPT-3, 175 B (Brown et al. 2020): GPT-2 whose every second layer sees a band of the last 256 tokens.

    The paper gives no width of the band; 256 is that of GPT-Neo, its open counterpart.
    """
    dense = biased(heads, kv_heads, key_width, dropout)
    banded = dense.model_copy(update={"pattern": Window(before=255, after=0)})
    feedforward = Plain(width=ff, activation=GELU_TANH)
    blocks = tuple(Block(mixer=attention, feedforward=feedforward, dropout=dropout) for attention in (dense, banded))
    stack = Stack(depth=depth, blocks=blocks, position=Learned(length=length), final_norm=LayerNorm())
    tokens = Tokens(vocab=vocab, dropout=dropout)
    init, ids = Normal(residual=True), special_ids(vocab, bos=50_256, eos=50_256)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=tied(head), init=init, special=ids)


def neox(
    *,
    depth: int = 44,
    width: int = 6144,
    heads: int = 64,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 50_432,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """GPT-NeoX, 20 B (Black et al. 2022): attention and feed-forward in parallel, a quarter of each head rotary."""
    attention = biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=GELU_TANH), order=Parallel(), dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(fraction=0.25), final_norm=LayerNorm())
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, special=special_ids(vocab, bos=0, eos=0))


def bloom(
    *,
    depth: int = 24,
    width: int = 1024,
    heads: int = 16,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 250_880,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN,
) -> ModelConfig:
    """BLOOM, 560 M (BigScience 2022): pre-norm decoder, ALiBi, normed embeddings, tied."""
    attention = biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=GELU_TANH), dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Alibi(), final_norm=LayerNorm())
    tokens = Tokens(vocab=vocab, norm=LayerNorm(), dropout=dropout)
    ids = special_ids(vocab, pad=3, bos=1, eos=2)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=tied(head), special=ids)


def palm(
    *,
    depth: int = 118,
    width: int = 18_432,
    heads: int = 48,
    kv_heads: int | None = None,
    key_width: int = 256,
    ff: int | None = None,
    vocab: int = 256_000,
    dropout: float = 0.0,
    head: Head = NEXT_TOKEN_SCALED,
) -> ModelConfig:
    """PaLM, 540 B (Chowdhery et al. 2022): parallel sublayers, one key/value head, SwiGLU, rotary, no biases, tied."""
    norm = LayerNorm(bias=False)
    attention = Attention(heads=heads, kv_heads=given(kv_heads, 1), key_width=key_width, dropout=dropout)
    order = Parallel(shared_norm=True)
    block = Block(mixer=attention, feedforward=Gated(width=ff), norm=norm, order=order, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=tied(head), init=FanIn())
