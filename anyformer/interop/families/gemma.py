"""Gemma 1, 2 and 3 (Gemma team 2024, 2025): norms with 1 + γ, scaled embeddings; from 2 on norms on both sides, caps
and windows; 3 has norms of heads and another theta in windows."""

from dataclasses import replace
from functools import partial
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.block_fields import LayerKinds, sliding
from anyformer.interop.families.decoder_frame import decoder_family, decoder_rules
from anyformer.interop.family import Family, Framing, with_mixer
from anyformer.interop.rotary_fields import FULL, NEAR, read_rotaries, read_rotary, write_rotaries
from anyformer.interop.weight_rules import Names

FIRST = llama.LlamaFields(kind="gemma", bias="attention_bias", norm_options={"offset": 1.0, "cast": "after_scale"})
SECOND = replace(FIRST, kind="gemma2", activation="hidden_activation")
FIELDS = {1: FIRST, 2: SECOND, 3: replace(SECOND, kind="gemma3_text")}  # by version
LAYER: Names = {
    **llama.ATTENTION,
    **llama.NORMS,
    **llama.GATED,
    "mixer.norm_branch": "post_attention_layernorm",
    "feedforward.norm_in": "pre_feedforward_layernorm",
    "feedforward.norm_branch": "post_feedforward_layernorm",
}
RULES = {1: llama.rules, **dict.fromkeys((2, 3), partial(decoder_rules, "model.layers", LAYER))}


def read(version: int, fields: Fields) -> ModelConfig:
    fields.must("use_bidirectional_attention", False)
    if version == 3:
        fields.must("attn_logit_softcapping", None)  # `transformers` reads it and does nothing
    family = FIELDS[version]
    key, norm = fields("head_dim"), family.normed(fields)
    scale = fields("query_pre_attn_scalar") if version > 1 else key
    mixer = {
        "qk_norm": norm if version == 3 else spec.NoNorm(),
        "scale": spec.InvSqrtKey() if scale == key else spec.Times(value=scale**-0.5),
        "cap": fields.nullable("attn_logit_softcapping", float) if version == 2 else None,
    }
    block = family.block(
        fields,
        mixer=mixer,
        feedforward={"activation": _activation(fields)} if version == 1 else {},
        placement="pre" if version == 1 else "sandwich",
    )
    layers, position = _layers(version, fields, block, family.read_depth(fields))
    cap = None if version == 1 else fields.nullable("final_logit_softcapping", float)
    return family.decoder(fields, layers, position, tokens={"scale": spec.SqrtWidth()}, head=spec.LM(cap=cap))


def _activation(fields: Fields) -> spec.Activation:
    """Return the activation of Gemma 1, in whose files gelu under either name means the tanh approximation."""
    name = fields("hidden_act", fields("hidden_activation", FIRST.default("hidden_act")))
    both = [fields.activation("hidden_act", name), fields.activation("hidden_activation", name)]
    first, second = (spec.Gelu(approximate="tanh") if act == spec.Gelu() else act for act in both)
    if first != second:
        fields.refuse(
            "hidden_activation", "and hidden_act name different activations; --ignore-field drops one of them"
        )
    return first


def _layers(version: int, fields: Fields, full: spec.Block, depth: int) -> tuple[list[spec.Block], spec.Rotary]:
    """Return the layers, and the rotary positions of those with full attention."""
    if version == 1:
        return [full] * depth, read_rotary(fields, 10_000.0)
    size = fields("sliding_window")
    every = 2 if version == 2 else fields("sliding_window_pattern", 6)
    fields.silent("_sliding_window_pattern", "cache_implementation")
    default_kinds = [NEAR if (i + 1) % every else FULL for i in range(depth)]
    kinds = fields.layer_types(depth, default_kinds, (FULL, NEAR))
    near = sliding(full, size)
    if version == 2:
        position = read_rotary(fields, 10_000.0)
    else:
        position, local = read_rotaries(fields, 1_000_000.0, fields("rope_local_base_freq", 10_000.0))
        if FULL not in kinds:  # then what they have is the stack's
            return [near] * depth, local
        near = with_mixer(near, position=local)
    return [near if kind == NEAR else full for kind in kinds], position


def write(version: int, config: ModelConfig) -> dict[str, Any]:
    family = FIELDS[version]
    parts = family.parts(config)
    mixer, key, layers = parts.mixer, parts.key, LayerKinds.of(parts.stack.unrolled())
    ropes = layers.ropes(parts.stack)
    rotary = ropes[FULL if FULL in ropes else NEAR]
    found = parts.fields() | parts.rotary_fields(rotary)
    if version == 1:
        return found
    scale = round(mixer.scale.value**-2) if isinstance(mixer.scale, spec.Times) and mixer.scale.value > 0 else key
    found |= {
        "query_pre_attn_scalar": scale,
        "sliding_window": layers.size or family.default("sliding_window"),
        "layer_types": layers.kinds,
        "attn_logit_softcapping": mixer.cap if version == 2 else None,
        "final_logit_softcapping": config.head.cap if isinstance(config.head, spec.LM) else None,
    }
    if version == 3:
        found["rope_parameters"] = write_rotaries({NEAR: spec.Rotary(), **ropes, FULL: rotary}, key)
    return found


def _family(title: str, version: int) -> Family:
    heads = {f"{title}ForCausalLM": "lm", "Gemma3TextModel" if version == 3 else f"{title}Model": "body"}
    read_one, write_one, kind = partial(read, version), partial(write, version), FIELDS[version].kind
    return decoder_family(kind, title, read_one, write_one, RULES[version], Framing(before=("bos",)), heads=heads)


GEMMA, GEMMA2, GEMMA3 = _family("Gemma", 1), _family("Gemma2", 2), _family("Gemma3", 3)
