"""Well-known Transformers, each a function of a few numbers. Imports no torch.

Without arguments a preset is the published size. Every number can be given; what is not given follows the family's own
rule: feed-forward width, head width, the ratio of heads to key/value heads. `head` takes the place of the family's own,
and the output is tied only where the head has a vocabulary. Anything else is `model_copy` away. `PRESETS` lists them.
"""

from collections.abc import Callable
from typing import Literal, TypeVar

from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    ConfigError,
    Embedder,
    FanIn,
    Fault,
    Gated,
    Gelu,
    Head,
    Init,
    InvSqrtWidth,
    LayerNorm,
    Learned,
    MaskedLM,
    ModelConfig,
    Normal,
    Parallel,
    Plain,
    Projected,
    Relu,
    RMSNorm,
    Rotary,
    Sinusoidal,
    Special,
    SqrtWidth,
    Stack,
    T5Bias,
    Tanh,
    Tokens,
    Transform,
    Unscaled,
    Window,
    Xavier,
)

T = TypeVar("T")

GELU_TANH = Gelu(approximate="tanh")
NEXT_TOKEN = LM()
NEXT_TOKEN_T5 = LM(scale=InvSqrtWidth())
POOLER = Embedder(pool="first", transform=Transform(activation=Tanh()))

# -- with an encoder ------------------------------------------------------------------------------------------------


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
    drop = _given(dropout, 0.3 if size == "big" else 0.1)
    attention = Attention(heads=_given(heads, 8 * times), kv_heads=kv_heads, key_width=key_width)  # no dropout inside
    norm, feedforward = LayerNorm(eps=1e-6), Plain(width=ff, activation=Relu())
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, placement="post", dropout=drop)
    stack = Stack(depth=depth, blocks=(block,), position=Sinusoidal())
    tokens = Tokens(vocab=vocab, scale=SqrtWidth(), dropout=drop, pad=0)  # ids and eps as in tensor2tensor
    return _pair(_given(width, 512 * times), tokens, stack, head, Xavier(), _special(vocab, pad=0, eos=1, start=0))


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
    head: Head = NEXT_TOKEN_T5,
) -> ModelConfig:
    """T5 small, 61 M (Raffel et al. 2020): pre-norm with RMS norms, no biases, relative positions, all weights tied."""
    norm = RMSNorm(eps=1e-6)
    attention = Attention(heads=heads, kv_heads=kv_heads, key_width=key_width, scale=Unscaled(), dropout=dropout)
    feedforward = Plain(width=ff, activation=Relu(), bias=False, dropout=dropout)
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=T5Bias(), final_norm=norm, dropout=dropout)
    tokens = Tokens(vocab=vocab, dropout=dropout)  # no zero row for pad: the decoder starts from it
    return _pair(width, tokens, stack, head, FanIn(), _special(vocab, pad=0, eos=1, start=0))


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
    attention = _biased(heads, kv_heads, key_width, dropout)
    feedforward = Plain(width=ff, activation=Gelu(), dropout=dropout)
    block = Block(mixer=attention, feedforward=feedforward, placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length, offset=2))
    tokens = Tokens(vocab=vocab, norm=LayerNorm(), dropout=dropout, pad=1)
    return _pair(width, tokens, stack, head, Normal(), _special(vocab, pad=1, bos=0, eos=2, start=2))


def bert(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 30_522,
    length: int = 512,
    dropout: float = 0.1,
    head: Head = POOLER,
) -> ModelConfig:
    """BERT base, 109 M (Devlin et al. 2019): post-norm encoder with a tanh pooler; `head=MaskedLM()` gives logits."""
    norm = LayerNorm(eps=1e-12)
    attention = _biased(heads, kv_heads, key_width, dropout)
    feedforward = Plain(width=ff, activation=Gelu())
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length))
    tokens = Tokens(vocab=vocab, types=2, norm=norm, dropout=dropout)
    return ModelConfig(width=width, source=tokens, encoder=stack, head=head, tie=_tied(head), special=Special(pad=0))


def roberta(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 50_265,
    length: int = 512,
    dropout: float = 0.1,
    head: Head = POOLER,
) -> ModelConfig:
    """RoBERTa base, 125 M (Liu et al. 2019): BERT with one token type, trained longer on more text.

    For logits, `head=MaskedLM(transform=Transform(activation=Gelu(), norm=LayerNorm()))`: another eps than BERT's.
    """
    attention = _biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=Gelu()), placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length, offset=2))
    tokens = Tokens(vocab=vocab, types=1, norm=LayerNorm(), dropout=dropout, pad=1)
    ids = _special(vocab, pad=1, bos=0, eos=2)
    return ModelConfig(width=width, source=tokens, encoder=stack, head=head, tie=_tied(head), special=ids)


# -- decoder only ---------------------------------------------------------------------------------------------------


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
    attention = _biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=GELU_TANH), placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length))
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=_tied(head))


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
    attention = _biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=GELU_TANH), dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length), final_norm=LayerNorm())
    tokens = Tokens(vocab=vocab, dropout=dropout)
    init, ids = Normal(residual=True), _special(vocab, bos=50_256, eos=50_256)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=_tied(head), init=init, special=ids)


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
    attention = _biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=GELU_TANH), order=Parallel(), dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(fraction=0.25), final_norm=LayerNorm())
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, special=_special(vocab, bos=0, eos=0))


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
    attention = _biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=GELU_TANH), dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Alibi(), final_norm=LayerNorm())
    tokens = Tokens(vocab=vocab, norm=LayerNorm(), dropout=dropout)
    ids = _special(vocab, pad=3, bos=1, eos=2)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=_tied(head), special=ids)


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
    block = Block(mixer=attention, feedforward=Gated(width=_given(ff, two_thirds)), norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, special=_special(vocab, bos=1, eos=2))


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
    groups = _groups(heads, kv_heads, 4)
    attention = Attention(heads=heads, kv_heads=groups, key_width=key_width, pattern=window, dropout=dropout)
    block = Block(mixer=attention, feedforward=Gated(width=_given(ff, 7 * width // 2)), norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, special=_special(vocab, bos=1, eos=2))


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
    groups = _groups(heads, kv_heads, 2)
    attention = Attention(heads=heads, kv_heads=groups, key_width=key_width, qk_norm=norm, dropout=dropout)
    block = Block(mixer=attention, feedforward=Gated(width=_given(ff, 3 * width)), norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(theta=1e6), final_norm=norm)
    tokens = Tokens(vocab=vocab, dropout=dropout)
    ids = _special(vocab, bos=151_643, eos=151_645)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=_tied(head), special=ids)


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
    norm = RMSNorm(eps=1e-6, offset=1.0, cast="after_scale")
    attention = Attention(heads=heads, kv_heads=_groups(heads, kv_heads, 8), key_width=key_width, dropout=dropout)
    feedforward = Gated(width=_given(ff, 8 * width), activation=GELU_TANH)
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Rotary(), final_norm=norm)
    tokens = Tokens(vocab=vocab, scale=SqrtWidth(), dropout=dropout)
    ids = _special(vocab, pad=0, bos=2, eos=1)
    return ModelConfig(width=width, target=tokens, decoder=stack, head=head, tie=_tied(head), special=ids)


PRESETS: dict[str, Callable[..., ModelConfig]] = {
    f.__name__: f for f in (vaswani, gpt1, gpt2, bert, roberta, t5, bart, llama, mistral, qwen3, gemma, neox, bloom)
}

# -- what families share --------------------------------------------------------------------------------------------


def _biased(heads: int, kv_heads: int | None, key_width: int | None, dropout: float) -> Attention:
    """Attention with a bias on all four projections."""
    out = Projected(bias=True)
    return Attention(heads=heads, kv_heads=kv_heads, key_width=key_width, bias=True, output=out, dropout=dropout)


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
        tie="all" if _tied(head) == "output" else "inputs",
        init=init,
        special=special,
    )


def _tied(head: Head) -> Literal["output", "none"]:
    """Tied, where the head has a vocabulary."""
    return "output" if isinstance(head, (LM, MaskedLM)) else "none"


def _given(value: T | None, rule: T) -> T:
    return rule if value is None else value


def _groups(heads: int, kv_heads: int | None, ratio: int) -> int:
    """Key/value heads: given, or the most that divide `heads` and keep at least the family's ratio."""
    return _given(kv_heads, max(n for n in range(1, max(heads // ratio, 1) + 1) if heads % n == 0))


def _special(vocab: int, **ids: int) -> Special:
    """The family's special ids; those past the end of a smaller vocabulary are left open."""
    return Special(**{name: id for name, id in ids.items() if id < vocab})
