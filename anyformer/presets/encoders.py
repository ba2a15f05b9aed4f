"""Encoders of texts and images. Imports no torch."""

from anyformer.config import (
    Attention,
    BigBird,
    Block,
    Embedder,
    Gated,
    Gelu,
    Head,
    ImageTower,
    LayerNorm,
    Learned,
    ModelConfig,
    NoFeedForward,
    NoHead,
    NoMixer,
    NoNorm,
    Patches,
    Plain,
    QuickGelu,
    Rotary,
    Special,
    Stack,
    Tokens,
    Window,
)
from anyformer.presets.family import GELU_TANH, POOLER, biased, given, special_ids, tied

NO_HEAD = NoHead()
CLIP_VECTORS = Embedder(pool="last", projection=512, normalize=True, learned_scale=True)


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
    attention = biased(heads, kv_heads, key_width, dropout)
    feedforward = Plain(width=ff, activation=Gelu())
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length))
    tokens = Tokens(vocab=vocab, types=2, norm=norm, dropout=dropout)
    return ModelConfig(width=width, source=tokens, encoder=stack, head=head, tie=tied(head), special=Special(pad=0))


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
    attention = biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=Gelu()), placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length, offset=2))
    tokens = Tokens(vocab=vocab, types=1, norm=LayerNorm(), dropout=dropout, pad=1)
    ids = special_ids(vocab, pad=1, bos=0, eos=2)
    return ModelConfig(width=width, source=tokens, encoder=stack, head=head, tie=tied(head), special=ids)


def bigbird(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 50_358,
    length: int = 4096,
    dropout: float = 0.1,
    head: Head = POOLER,
) -> ModelConfig:
    """BigBird base, 127 M (Zaheer et al. 2020): BERT over blocks of 64 that see neighbours, global and random ones.

    For logits, `head=MaskedLM(transform=Transform(activation=Gelu(approximate="tanh"), norm=LayerNorm(eps=1e-12)))`.
    """
    norm = LayerNorm(eps=1e-12)
    # published global blocks: the first and the last; a position does not tell which one is last, so the first two
    pattern = BigBird(block=64, before=1, after=1, globals=2, randoms=3)
    attention = biased(heads, kv_heads, key_width, dropout).model_copy(update={"pattern": pattern})
    feedforward = Plain(width=ff, activation=GELU_TANH)
    block = Block(mixer=attention, feedforward=feedforward, norm=norm, placement="post", dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=length))
    tokens = Tokens(vocab=vocab, types=2, norm=norm, dropout=dropout, pad=0)
    ids = special_ids(vocab, pad=0, bos=1, eos=2)
    return ModelConfig(width=width, source=tokens, encoder=stack, head=head, tie=tied(head), special=ids)


def modernbert(
    *,
    depth: int = 22,
    width: int = 768,
    heads: int = 12,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 50_368,
    dropout: float = 0.0,
    head: Head = NO_HEAD,
) -> ModelConfig:
    """ModernBERT base, 149 M (Warner et al. 2024): pre-norm, rotary, GEGLU, no biases; two layers of three see 64 away.

    For logits, `head=MaskedLM(transform=Transform(activation=Gelu(), norm=LayerNorm(bias=False), bias=False))`.
    """
    norm, feedforward = LayerNorm(bias=False), Gated(width=given(ff, 3 * width // 2), activation=Gelu())
    full = Attention(heads=heads, kv_heads=kv_heads, key_width=key_width, dropout=dropout)
    local = full.model_copy(update={"pattern": Window(before=64, after=64), "position": Rotary(theta=1e4)})
    far, near = (Block(mixer=a, feedforward=feedforward, norm=norm, dropout=dropout) for a in (full, local))
    # The first attention has no norm, since the embeddings have one: that layer is written as two blocks.
    bare = Block(mixer=full, feedforward=NoFeedForward(), norm=NoNorm(), dropout=dropout)
    first = bare, far.model_copy(update={"mixer": NoMixer()})
    position = Rotary(theta=1.6e5)
    stack = Stack(depth=depth + 1, prefix=first, blocks=(near, near, far), position=position, final_norm=norm)
    tokens = Tokens(vocab=vocab, norm=norm, dropout=dropout, pad=50_283 if vocab > 50_283 else None)
    ids = special_ids(vocab, pad=50_283, bos=50_281, eos=50_282)
    return ModelConfig(width=width, source=tokens, encoder=stack, head=head, tie=tied(head), special=ids)


def clip(
    *,
    depth: int = 12,
    width: int = 512,
    heads: int = 8,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    vocab: int = 49_408,
    length: int = 77,
    image: int = 224,
    patch: int = 32,
    channels: int = 3,
    image_depth: int = 12,
    image_width: int = 768,
    image_heads: int = 12,
    dropout: float = 0.0,
    head: Head = CLIP_VECTORS,
) -> ModelConfig:
    """CLIP B/32, 151 M (Radford et al. 2021): a ViT and a causal text model with vectors in one space.

    `depth`, `width`, `heads` and `ff` are those of the text model.
    """
    patches = Patches(image_height=image, patch=patch, channels=channels, bias=False, norm=LayerNorm(), dropout=dropout)

    def stack(depth: int, length: int, attention: Attention, ff: int | None) -> Stack:
        block = Block(mixer=attention, feedforward=Plain(width=ff, activation=QuickGelu()), dropout=dropout)
        return Stack(depth=depth, blocks=(block,), position=Learned(length=length), final_norm=LayerNorm())

    seeing = stack(image_depth, patches.length, biased(image_heads, None, None, dropout), None)
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab, dropout=dropout),
        decoder=stack(depth, length, biased(heads, kv_heads, key_width, dropout), ff),
        head=head,
        image_tower=ImageTower(width=image_width, source=patches, encoder=seeing),
        special=special_ids(vocab, pad=1, bos=49_406, eos=49_407),
    )


def vit(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    kv_heads: int | None = None,
    key_width: int | None = None,
    ff: int | None = None,
    image: int = 224,
    patch: int = 16,
    channels: int = 3,
    dropout: float = 0.0,
    head: Head = POOLER,
) -> ModelConfig:
    """ViT B/16, 86 M (Dosovitskiy et al. 2021): a pre-norm encoder of patches after a class token, tanh pooler."""
    norm = LayerNorm(eps=1e-12)
    attention = biased(heads, kv_heads, key_width, dropout)
    block = Block(mixer=attention, feedforward=Plain(width=ff, activation=Gelu()), norm=norm, dropout=dropout)
    patches = Patches(image_height=image, patch=patch, channels=channels, dropout=dropout)
    stack = Stack(depth=depth, blocks=(block,), position=Learned(length=patches.length), final_norm=norm)
    return ModelConfig(width=width, source=patches, encoder=stack, head=head)
