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
    Parallel,
    Plain,
    Rotary,
    position_of,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import AnyRule, Reordered, Rule, pairs_to_halves

LENGTH = 2048  # longest text by default
ENDS = Ends(vocab=50_400, tied=False, bos=50_256, eos=50_256, context="n_positions")


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
    layers, tokens = [block] * fields.depth("n_layer", 28), {"dropout": fields("embd_pdrop", 0.0)}
    found = build_decoder(fields, width, layers, position, ENDS, tokens=tokens, head=LM(bias=True))
    return found.model_copy(update={"context": found.context or LENGTH})


def _fraction(rotated: int, key_width: int) -> float:
    """Return the part of a head that is `rotated` wide when rounded down."""
    part = rotated / key_width
    return part if int(key_width * part) == rotated else math.nextafter(part, 1)


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    rotated = parts.rotary.rotated(parts.key)
    return {**parts.gpt_fields(), "n_positions": config.context or LENGTH, "rotary_dim": rotated}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    mixer = attention(config.decoder.blocks[0])
    key, rotary = mixer.widths(config.width)[0], expect(position_of(mixer, config.decoder), Rotary, "decoder.position")
    pairs = pairs_to_halves(mixer.heads, key, rotary.rotated(key))
    qkv = Reordered.parts(pairs, pairs, torch.arange(mixer.heads * key))
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield Rule(f"{ours}.norm_in", f"{theirs}.ln_1")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.attn.{part}_proj" for part in "qkv"), conversion=qkv)
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attn.out_proj")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.fc_in")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.fc_out")
    yield from end_rules(config, "transformer.wte", "transformer.ln_f")


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
