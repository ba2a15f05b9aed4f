"""Gemma 1, 2 and 3 (Gemma team 2024, 2025): norms with 1 + γ, scaled embeddings; from 2 on norms on both sides, caps
and windows; 3 has norms of heads and another theta in windows."""

from dataclasses import replace
from functools import partial
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig, pattern_of, position_of
from anyformer.interop.config_fields import Fields, write_rotary
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import decoder_family, decoder_rules
from anyformer.interop.families.llama import FULL, NEAR
from anyformer.interop.family import Family, Framing, attention, expect

TANH = "gelu_pytorch_tanh"
SECOND = llama.LlamaDefaults(
    names=replace(llama.NAMES, activation="hidden_activation"),
    norm_options={"offset": 1.0, "cast": "after_scale"},
    vocab=256_000,
    width=2304,
    depth=26,
    heads=8,
    kv_heads=4,
    key_width=256,
    ff=9216,
    activation=TANH,
    length=8192,
    tied=True,
    pad=0,
    bos=2,
    eos=1,
)
SIZES = replace(SECOND, names=llama.NAMES, width=3072, depth=28, heads=16, kv_heads=16, ff=24_576)
FIELDS = {1: SIZES, 2: SECOND, 3: replace(SECOND, vocab=262_208, length=131_072)}  # by version
LAYER = {
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
    activation, norm, key = _activation(version, fields), family.normed(fields), fields("head_dim", 256)
    scale = fields("query_pre_attn_scalar", 256) if version > 1 else key
    mixer = {
        "qk_norm": norm if version == 3 else spec.NoNorm(),
        "scale": spec.InvSqrtKey() if scale == key else spec.Times(value=scale**-0.5),
        "cap": _cap(fields, "attn_logit_softcapping", version, 50.0) if version == 2 else None,
    }
    block = family.block(
        fields,
        bias=fields("attention_bias", False),
        mixer=mixer,
        feedforward={"activation": activation},
        placement="pre" if version == 1 else "sandwich",
    )
    mixers, position = _layers(version, fields, attention(block), family.read_depth(fields))
    layers = [block.model_copy(update={"mixer": mixer}) for mixer in mixers]
    cap = _cap(fields, "final_logit_softcapping", version, 30.0)
    return family.decoder(fields, layers, position, tokens={"scale": spec.SqrtWidth()}, head=spec.LM(cap=cap))


def _activation(version: int, fields: Fields) -> spec.Activation:
    """Return the activation. In files of Gemma 1, gelu under either name means the tanh approximation."""
    if version > 1:
        return fields.activation("hidden_activation", TANH)
    name = fields("hidden_act", fields("hidden_activation", TANH))
    both = [fields.activation("hidden_act", name), fields.activation("hidden_activation", name)]
    first, second = (spec.Gelu(approximate="tanh") if act == spec.Gelu() else act for act in both)
    if first != second:
        fields.refuse(
            "hidden_activation", "and hidden_act name different activations; --ignore-field drops one of them"
        )
    return first


def _cap(fields: Fields, field: str, version: int, default: float) -> float | None:
    if version == 1:
        return None
    return fields.nullable(field, default) if version == 2 else fields.maybe(field, float)


def _layers(version: int, fields: Fields, full: spec.Attention, depth: int) -> tuple[list[spec.Attention], spec.Rotary]:
    """Return the attention of each layer, and the rotary positions of full-attention layers."""
    if version == 1:
        return [full] * depth, fields.rotary(10_000.0)
    size = fields("sliding_window", 4096)
    every = 2 if version == 2 else fields("sliding_window_pattern", 6)
    fields.silent("_sliding_window_pattern", "cache_implementation")
    default_kinds = [NEAR if (i + 1) % every else FULL for i in range(depth)]
    kinds = fields.layer_types(depth, default_kinds, (FULL, NEAR))
    near = full.model_copy(update={"pattern": spec.Window(before=size - 1, after=0)})
    if version == 2:
        position = fields.rotary(10_000.0)
    else:
        position, local = fields.rotaries(1_000_000.0, fields("rope_local_base_freq", 10_000.0))
        if FULL not in kinds:  # then what they have is the stack's
            return [near] * depth, local
        near = near.model_copy(update={"position": local})
    return [near if kind == NEAR else full for kind in kinds], position


def write(version: int, config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS[version].parts(config)
    stack, mixer, key = parts.stack, parts.mixer, parts.key
    mixers = [attention(layer) for layer in stack.unrolled()]
    windows = [isinstance(pattern_of(one, "decoder"), spec.Window) for one in mixers]
    ropes = {
        near: expect(position_of(one, stack), spec.Rotary, "decoder.position")
        for near, one in zip(windows, mixers, strict=True)
    }
    rotary = ropes.get(False) or ropes[True]
    found = parts.fields() | parts.rotary_fields(rotary) | {"attention_bias": mixer.bias}
    if version == 1:
        return found
    size = max(
        (p.before + 1 for one in mixers if isinstance(p := pattern_of(one, "decoder"), spec.Window)), default=4096
    )
    scale = round(mixer.scale.value**-2) if isinstance(mixer.scale, spec.Times) and mixer.scale.value > 0 else key
    found |= {
        "query_pre_attn_scalar": scale,
        "sliding_window": size,
        "layer_types": [NEAR if near else FULL for near in windows],
        "attn_logit_softcapping": mixer.cap if version == 2 else None,
        "final_logit_softcapping": config.head.cap if isinstance(config.head, spec.LM) else None,
    }
    if version == 3:
        local = ropes.get(True) or spec.Rotary()
        found["rope_parameters"] = {FULL: write_rotary(rotary, key), NEAR: write_rotary(local, key)}
    return found


def _family(kind: str, title: str, version: int) -> Family:
    heads = {f"{title}ForCausalLM": "lm", "Gemma3TextModel" if version == 3 else f"{title}Model": "body"}
    read_one, write_one = partial(read, version), partial(write, version)
    return decoder_family(kind, title, read_one, write_one, RULES[version], Framing(before=("bos",)), heads=heads)


GEMMA = _family("gemma", "Gemma", 1)
GEMMA2 = _family("gemma2", "Gemma2", 2)
GEMMA3 = _family("gemma3_text", "Gemma3", 3)
