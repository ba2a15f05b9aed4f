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
from anyformer.presets.family import GELU_TANH, POOLER, Arguments, biased, given, preset, special_ids

NO_HEAD = NoHead()
CLIP_VECTORS = Embedder(pool="last", projection=512, normalize=True, learned_scale=True)


@preset(depth=12, width=768, heads=12, vocab=30_522, length=512, dropout=0.1, head=POOLER)
def bert(size: Arguments) -> ModelConfig:
    """BERT base, 109 M (Devlin et al. 2019): post-norm encoder with a tanh pooler; `head=MaskedLM()` gives logits."""
    norm = LayerNorm(eps=1e-12)
    block = size.block(size.biased(), Plain(width=size.ff, activation=Gelu()), norm=norm, placement="post")
    stack = size.stack(block, position=Learned(length=size.length))
    return size.encoder(stack, size.tokens(types=2, norm=norm), special=Special(pad=0))


@preset(depth=12, width=768, heads=12, vocab=50_265, length=512, dropout=0.1, head=POOLER)
def roberta(size: Arguments) -> ModelConfig:
    """RoBERTa base, 125 M (Liu et al. 2019): BERT with one token type, trained longer on more text.

    For logits, `head=MaskedLM(transform=Transform(activation=Gelu(), norm=LayerNorm()))`: another eps than BERT's.
    """
    block = size.block(size.biased(), Plain(width=size.ff, activation=Gelu()), placement="post")
    stack = size.stack(block, position=Learned(length=size.length, offset=2))
    return size.encoder(stack, size.tokens(types=1, norm=LayerNorm(), pad=1), special=size.ids(pad=1, bos=0, eos=2))


@preset(depth=12, width=768, heads=12, vocab=50_358, length=4096, dropout=0.1, head=POOLER)
def bigbird(size: Arguments) -> ModelConfig:
    """BigBird base, 127 M (Zaheer et al. 2020): BERT over blocks of 64 that see neighbours, global and random ones.

    For logits, `head=MaskedLM(transform=Transform(activation=Gelu(approximate="tanh"), norm=LayerNorm(eps=1e-12)))`.
    """
    norm = LayerNorm(eps=1e-12)
    # published global blocks: the first and the last; a position does not show which one is last, so the first two
    attention = size.biased(pattern=BigBird(block=64, before=1, after=1, globals=2, randoms=3))
    block = size.block(attention, Plain(width=size.ff, activation=GELU_TANH), norm=norm, placement="post")
    stack = size.stack(block, position=Learned(length=size.length))
    return size.encoder(stack, size.tokens(types=2, norm=norm, pad=0), special=size.ids(pad=0, bos=1, eos=2))


@preset(depth=22, width=768, heads=12, vocab=50_368, head=NO_HEAD)
def modernbert(size: Arguments) -> ModelConfig:
    """ModernBERT base, 149 M (Warner et al. 2024): pre-norm, rotary, GEGLU, no biases; two layers of three see 64 away.

    For logits, `head=MaskedLM(transform=Transform(activation=Gelu(), norm=LayerNorm(bias=False), bias=False))`.
    """
    norm, feedforward = LayerNorm(bias=False), Gated(width=given(size.ff, 3 * size.width // 2), activation=Gelu())
    full = size.attention()
    local = full.model_copy(update={"pattern": Window(before=64, after=64), "position": Rotary(theta=1e4)})
    far, near = (size.block(attention, feedforward, norm=norm) for attention in (full, local))
    # The first attention has no norm, since the embeddings have one: that layer is written as two blocks.
    first = size.block(full, NoFeedForward(), norm=NoNorm()), far.model_copy(update={"mixer": NoMixer()})
    blocks, position = (near, near, far), Rotary(theta=1.6e5)
    stack = Stack(depth=size.depth + 1, prefix=first, blocks=blocks, position=position, final_norm=norm)
    tokens = size.tokens(norm=norm, pad=50_283 if size.vocab > 50_283 else None)
    return size.encoder(stack, tokens, special=size.ids(pad=50_283, bos=50_281, eos=50_282))


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


@preset(depth=12, width=768, heads=12, image=224, patch=16, channels=3, head=POOLER)
def vit(size: Arguments) -> ModelConfig:
    """ViT B/16, 86 M (Dosovitskiy et al. 2021): a pre-norm encoder of patches after a class token, tanh pooler."""
    norm = LayerNorm(eps=1e-12)
    block = size.block(size.biased(), Plain(width=size.ff, activation=Gelu()), norm=norm)
    patches = Patches(image_height=size.image, patch=size.patch, channels=size.channels, dropout=size.dropout)
    stack = size.stack(block, position=Learned(length=patches.length), final_norm=norm)
    return ModelConfig(width=size.width, source=patches, encoder=stack, head=size.head)
