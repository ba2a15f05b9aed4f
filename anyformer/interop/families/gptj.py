"""GPT-J (Wang & Komatsuzaki 2021): sublayers side by side after one norm, rotary pairs of neighbours."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anyformer.config import LM, ConfigError, ModelConfig, Parallel, Rotary, position_of
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import GPT_NAMES, DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import attention, expect
from anyformer.interop.weight_rules import AnyRule, Reordered, pairs_to_halves, split_names

NAMES = replace(GPT_NAMES, context="n_positions")
FIELDS = DecoderFields(names=NAMES, vocab=50_400, width=4096, depth=28, heads=16, bos=50_256, eos=50_256)
LAYER = {
    "norm_in": "ln_1",
    "mixer.inner.qkv": split_names("attn.{}_proj"),
    "mixer.inner.out": "attn.out_proj",
    "feedforward.inner.up": "mlp.fc_in",
    "feedforward.inner.down": "mlp.fc_out",
}


def read(fields: Fields) -> ModelConfig:
    width, heads, rotated = fields("n_embd", FIELDS.width), fields("n_head", FIELDS.heads), fields("rotary_dim", 64)
    if rotated * heads > width:
        raise ConfigError([fields.fault("rotary_dim", f"= {rotated}: must be at most the width of a head")])
    block = FIELDS.block(fields, order=Parallel(shared_norm=True))
    position = Rotary(fraction=_fraction(rotated, width // heads))
    found = FIELDS.decoder(fields, block, position, head=LM(bias=True))
    return found.model_copy(update={"context": found.context or FIELDS.length})


def _fraction(rotated: int, key_width: int) -> float:
    """Return the part of a head that is `rotated` wide when rounded down."""
    part = rotated / key_width
    return part if int(key_width * part) == rotated else math.nextafter(part, 1)


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    rotated = parts.rotary.rotated(parts.key)
    return parts.fields() | {"n_positions": config.context or FIELDS.length, "rotary_dim": rotated}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    mixer = attention(config.decoder.blocks[0])
    key, rotary = mixer.widths(config.width)[0], expect(position_of(mixer, config.decoder), Rotary, "decoder.position")
    pairs = pairs_to_halves(mixer.heads, key, rotary.rotated(key))
    qkv = {"mixer.inner.qkv": Reordered.parts(pairs, pairs, torch.arange(mixer.heads * key))}
    ends = {"table": "transformer.wte", "norm": "transformer.ln_f"}
    yield from decoder_rules("transformer.h", LAYER, config, conversions=qkv, **ends)


BUFFERS = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",)
GPTJ = decoder_family("gptj", "GPTJ", read, write, rules, prefix="transformer.", buffers=BUFFERS)
