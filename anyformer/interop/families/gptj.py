"""GPT-J (Wang & Komatsuzaki 2021): sublayers side by side after one norm, rotary pairs of neighbours."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from anyformer.config import (
    LM,
    Attention,
    Block,
    ConfigError,
    LayerNorm,
    ModelConfig,
    NoHead,
    Parallel,
    Plain,
    Rotary,
    Stack,
    Tokens,
    hidden_width,
    position_of,
)
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Reordered, Rule, pairs_to_halves


def read(fields: Fields) -> ModelConfig:
    width, heads, rotated = fields("n_embd", 4096), fields("n_head", 16), fields("rotary_dim", 64)
    if rotated * heads > width:
        raise ConfigError([fields.fault("rotary_dim", f"= {rotated}: must be at most the width of a head")])
    norm = LayerNorm(eps=fields("layer_norm_epsilon", 1e-5))
    feedforward = Plain(
        width=fields.maybe("n_inner", int), activation=fields.activation("activation_function", "gelu_new")
    )
    mixer, order = Attention(heads=heads, dropout=fields("attn_pdrop", 0.0)), Parallel(shared_norm=True)
    drop = fields("resid_pdrop", 0.0)
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, order=order, dropout=drop)
    position = Rotary(fraction=_fraction(rotated, width // heads))
    tied, vocab = fields("tie_word_embeddings", False), fields("vocab_size", 50_400)
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab, dropout=fields("embd_pdrop", 0.0)),
        decoder=Stack(depth=fields.depth("n_layer", 28), blocks=(block,), position=position, final_norm=norm),
        head=LM(bias=True) if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=fields.special(vocab, bos=50_256, eos=50_256),
        context=fields("n_positions", 2048),
    )


def _fraction(rotated: int, key_width: int) -> float:
    """Return the part of a head that is `rotated` wide when rounded down."""
    part = rotated / key_width
    return part if int(key_width * part) == rotated else math.nextafter(part, 1)


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    tokens, block = expect(config.target, Tokens, "target"), stack.blocks[0]
    mixer, feedforward = attention(block), expect(block.feedforward, Plain, "decoder.blocks.0.feedforward")
    rotary = expect(position_of(mixer, stack), Rotary, "decoder.position")
    return {
        "vocab_size": tokens.rows,
        "n_positions": config.context or 2048,
        "n_embd": config.width,
        "n_layer": stack.depth,
        "n_head": mixer.heads,
        "rotary_dim": rotary.rotated(mixer.widths(config.width)[0]),
        "n_inner": hidden_width(feedforward, config.width),
        "activation_function": name_of(feedforward.activation, first="gelu_new"),
        "layer_norm_epsilon": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "resid_pdrop": block.dropout,
        "embd_pdrop": tokens.dropout,
        "attn_pdrop": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    mixer = attention(config.decoder.blocks[0])
    key, rotary = mixer.widths(config.width)[0], expect(position_of(mixer, config.decoder), Rotary, "decoder.position")
    pairs = pairs_to_halves(mixer.heads, key, rotary.rotated(key))
    qkv = Reordered.parts(pairs, pairs, torch.arange(mixer.heads * key))
    yield Rule("target.table", "transformer.wte")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield Rule(f"{ours}.norm_in", f"{theirs}.ln_1")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.attn.{part}_proj" for part in "qkv"), conversion=qkv)
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attn.out_proj")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.fc_in")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.fc_out")
    yield Rule("decoder.final_norm", "transformer.ln_f")
    yield Rule("head.table", "lm_head.weight")
    yield Rule("head.bias", "lm_head.bias")
    if config.tie == "output":
        yield Alias("lm_head.weight", of="transformer.wte.weight")


GPTJ = Family(
    kind="gptj",
    shape="decoder",
    heads={"GPTJForCausalLM": "lm", "GPTJModel": "body"},
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),
    read=read,
    write=write,
    rules=rules,
)
