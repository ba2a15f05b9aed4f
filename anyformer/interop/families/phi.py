"""Phi-1 and Phi-2 (Gunasekar et al. 2023), and Phi-3 and Phi-4 (Abdin et al. 2024).

The first two have sublayers side by side after one norm, and a part of each head rotary. The others are Llama with the
projections of a layer in one matrix.
"""

import math
import warnings
from functools import partial
from typing import Any

from anyformer.config import (
    LM,
    ConfigError,
    LayerNorm,
    LinearScaling,
    LongRopeScaling,
    ModelConfig,
    NoNorm,
    NoScaling,
    Parallel,
    Rotary,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.families.llama import LlamaFields
from anyformer.interop.family import Framing, expect, map_blocks, stack_of, with_stack
from anyformer.interop.rotary_fields import read_rotary
from anyformer.interop.transformers_fields import rope_fields
from anyformer.interop.weight_rules import split_names

FIELDS = LlamaFields(kind="phi3", window=True, fraction=1.0)
LONG_ROPE = ("longrope", "su", "yarn")  # `transformers` reads the others as the first


def read(fields: Fields) -> ModelConfig:
    fields.silent("embd_pdrop", "attention_bias")  # not used by `transformers`
    original = fields("original_max_position_embeddings", least=2)
    scaling = _long_rope(fields, original)
    found = llama.read(FIELDS, fields)
    rotary = expect(stack_of(found).position, Rotary, "decoder.position")
    if not isinstance(rotary.scaling, (NoScaling, LinearScaling)):
        what = "must be of rope_type default, linear or longrope: of phi3, others are not supported"
        fields.refuse("rope_parameters", what)
    if scaling is not None:
        found = with_stack(found, position=rotary.model_copy(update={"scaling": scaling}))
        found = found.model_copy(update={"context": scaling.context or found.context})
    drop = fields("resid_pdrop")
    return map_blocks(found, lambda block: block.model_copy(update={"dropout": drop}))


def _long_rope(fields: Fields, original: int) -> LongRopeScaling | None:
    """Return LongRoPE's scaling.

    `transformers` uses the short factors for calls of at most `original` tokens, and the long ones for others; keys in
    a cache keep theirs. Here a model has one set: the short factors and no longer texts, or, in a file without short
    factors, the long ones at every length.
    """
    table = "rope_parameters" if fields.maybe("rope_scaling", dict) is None else "rope_scaling"
    fields.alias("rope_scaling", "rope_parameters")
    given = fields.maybe("rope_parameters", dict) or {}
    if (given.get("rope_type") or given.get("type")) not in LONG_ROPE:
        return None
    inner, outer = fields.table("rope_parameters", given), ("rope_theta", "partial_rotary_factor")
    inner.known = rope_fields()
    inner.silent("rope_type", "type", "original_max_position_embeddings", *outer)
    length = fields("max_position_embeddings")
    short, long = (_factors(inner, f"{name}_factor") for name in ("short", "long"))
    factor = inner("factor", length / original)
    tempered = inner.maybe("attention_factor", float)
    if tempered is None:
        tempered = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    inner.close()
    fields.change("rope_parameters", {name: given[name] for name in outer if name in given})
    if (used := short or long) is None:
        raise ConfigError([inner.fault("long_factor", "is missing")])
    limit = None if short is None or short == long else original
    if long and limit and length > limit:
        what = f"its short factors are read, for texts of up to {limit:,} tokens"
        hint = f"--ignore-field {table}.short_factor reads the long ones, for longer texts"
        warnings.warn(f"{table}: {what}; {hint}", stacklevel=2)
    return LongRopeScaling(factors=used, attention_factor=tempered, context=limit)


def _factors(fields: Fields, name: str) -> tuple[float, ...] | None:
    given = fields.maybe(name, list)
    if given is not None and not all(type(x) in (int, float) and 0 < x < math.inf for x in given):
        raise ConfigError([fields.fault(name, "must be a list of positive numbers")])
    return None if given is None else tuple(map(float, given))


def write(config: ModelConfig) -> dict[str, Any]:
    found = llama.write(FIELDS, config)
    found["resid_pdrop"] = stack_of(config).blocks[0].dropout
    if found["rope_parameters"]["rope_type"] == "longrope":
        found["original_max_position_embeddings"] = found["max_position_embeddings"]
    return found


LAYER = {
    **llama.LAYER,
    "mixer.inner.qkv": "self_attn.qkv_proj",
    "feedforward.inner.gate_up": "mlp.gate_up_proj",
}
RULES = partial(decoder_rules, "model.layers", LAYER)
PHI3 = decoder_family("phi3", "Phi3", read, write, RULES, Framing(before=("bos",)))

# -- Phi ---------------------------------------------------------------------------------------------------------------

PHI_FIELDS = DecoderFields(
    kind="phi", kv_heads="num_key_value_heads", embedding_dropout="embd_pdrop", dropout="resid_pdrop"
)
PHI_LAYER = {
    "norm_in": "input_layernorm",
    "mixer.inner.qkv": split_names("self_attn.{}_proj"),
    "mixer.inner.out": "self_attn.dense",
    "mixer.inner.q_norm": "self_attn.q_layernorm",
    "mixer.inner.k_norm": "self_attn.k_layernorm",
    "feedforward.inner.up": "mlp.fc1",
    "feedforward.inner.down": "mlp.fc2",
}


def _read_phi(fields: Fields) -> ModelConfig:
    fields.must("head_dim", fields("hidden_size") // fields("num_attention_heads"))
    norm = PHI_FIELDS.normed(fields) if fields("qk_layernorm") else NoNorm()
    block = PHI_FIELDS.block(fields, bias=True, mixer={"qk_norm": norm}, order=Parallel(shared_norm=True))
    return PHI_FIELDS.decoder(fields, block, read_rotary(fields, 10_000.0, 0.5), head=LM(bias=True))


def _write_phi(config: ModelConfig) -> dict[str, Any]:
    parts = PHI_FIELDS.parts(config)
    normed = isinstance(parts.mixer.qk_norm, LayerNorm)
    return {**parts.fields(), **parts.rotary_fields(fraction=True), "qk_layernorm": normed}


PHI_RULES = partial(decoder_rules, "model.layers", PHI_LAYER, norm="model.final_layernorm")
PHI = decoder_family("phi", "Phi", _read_phi, _write_phi, PHI_RULES)
