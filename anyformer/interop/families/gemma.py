"""Gemma 1, 2 and 3 (Gemma team 2024, 2025): norms with 1 + γ, scaled embeddings; from 2 on norms on both sides, caps
and windows; 3 has norms of heads and another theta in windows."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from anyformer.config import (
    LM,
    Activation,
    Attention,
    Block,
    Gated,
    Gelu,
    InvSqrtKey,
    ModelConfig,
    NoNorm,
    Projected,
    RMSNorm,
    Rotary,
    SqrtWidth,
    Times,
    Window,
    pattern_of,
    position_of,
)
from anyformer.interop.config_fields import Fields, length_of, write_rotary
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import BUFFERS, DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.families.llama import FULL, NEAR
from anyformer.interop.family import Family, Framing, attention, expect
from anyformer.interop.weight_rules import AnyRule, Rule

SIZES = {  # where a config.json is silent: width, feed-forward, layers, heads, key/value heads, vocabulary
    1: (3072, 24_576, 28, 16, 16, 256_000),
    2: (2304, 9216, 26, 8, 4, 256_000),
    3: (2304, 9216, 26, 8, 4, 262_208),
}
TANH = "gelu_pytorch_tanh"


def read(version: int, fields: Fields) -> ModelConfig:
    fields.must("use_bidirectional_attention", False)
    if version == 3:
        fields.must("attn_logit_softcapping", None)  # `transformers` reads it and does nothing
    width, ff, depth, heads, kv_heads, vocab = SIZES[version]
    width, depth = fields("hidden_size", width), fields.depth("num_hidden_layers", depth)
    norm = RMSNorm(eps=fields("rms_norm_eps", 1e-6), offset=1.0, cast="after_scale")
    bias, key = fields("attention_bias", False), fields("head_dim", 256)
    scale = fields("query_pre_attn_scalar", 256) if version > 1 else key
    full = Attention(
        heads=fields("num_attention_heads", heads),
        kv_heads=fields("num_key_value_heads", kv_heads),
        key_width=key,
        bias=bias,
        output=Projected(bias=bias),
        qk_norm=norm if version == 3 else NoNorm(),
        scale=InvSqrtKey() if scale == key else Times(value=scale**-0.5),
        cap=_cap(fields, "attn_logit_softcapping", version, 50.0) if version == 2 else None,
        dropout=fields("attention_dropout", 0.0),
    )
    layers, position = _layers(version, fields, full, depth)
    feedforward = Gated(width=fields("intermediate_size", ff), activation=_activation(version, fields))
    block = Block(mixer=full, feedforward=feedforward, norm=norm, placement="pre" if version == 1 else "sandwich")
    cap = _cap(fields, "final_logit_softcapping", version, 30.0)
    blocks = [block.model_copy(update={"mixer": mixer}) for mixer in layers]
    ends = Ends(vocab, tied=True, pad=0, bos=2, eos=1)
    return build_decoder(fields, width, blocks, position, ends, tokens={"scale": SqrtWidth()}, head=LM(cap=cap))


def _activation(version: int, fields: Fields) -> Activation:
    """Return the activation. In files of Gemma 1, gelu under either name means the tanh approximation."""
    if version > 1:
        return fields.activation("hidden_activation", TANH)
    name = fields("hidden_act", fields("hidden_activation", TANH))
    both = [fields.activation("hidden_act", name), fields.activation("hidden_activation", name)]
    first, second = (Gelu(approximate="tanh") if act == Gelu() else act for act in both)
    if first != second:
        fields.refuse(
            "hidden_activation", "and hidden_act name different activations; --ignore-field drops one of them"
        )
    return first


def _cap(fields: Fields, field: str, version: int, default: float) -> float | None:
    if version == 1:
        return None
    return fields.nullable(field, default) if version == 2 else fields.maybe(field, float)


def _layers(version: int, fields: Fields, full: Attention, depth: int) -> tuple[list[Attention], Rotary]:
    """Return the attention of each layer, and the rotary positions of full-attention layers."""
    if version == 1:
        return [full] * depth, fields.rotary(10_000.0)
    size = fields("sliding_window", 4096)
    every = 2 if version == 2 else fields("sliding_window_pattern", 6)
    fields.silent("_sliding_window_pattern", "cache_implementation")
    default_kinds = [NEAR if (i + 1) % every else FULL for i in range(depth)]
    kinds = fields.layer_types(depth, default_kinds, (FULL, NEAR))
    near = full.model_copy(update={"pattern": Window(before=size - 1, after=0)})
    if version == 2:
        position = fields.rotary(10_000.0)
    else:
        position, local = fields.rotaries(1_000_000.0, fields("rope_local_base_freq", 10_000.0))
        if FULL not in kinds:  # then what they have is the stack's
            return [near] * depth, local
        near = near.model_copy(update={"position": local})
    return [near if kind == NEAR else full for kind in kinds], position


def write(version: int, config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Gated)
    stack, mixer, key = parts.stack, parts.mixer, parts.key
    mixers = [attention(layer) for layer in stack.unrolled()]
    windows = [isinstance(pattern_of(one, "decoder"), Window) for one in mixers]
    ropes = {
        near: expect(position_of(one, stack), Rotary, "decoder.position")
        for near, one in zip(windows, mixers, strict=True)
    }
    rotary = ropes.get(False) or ropes[True]
    found: dict[str, Any] = parts.fields(TANH) | {
        "num_key_value_heads": mixer.groups,
        "head_dim": key,
        "rms_norm_eps": expect(parts.block.norm, RMSNorm, "decoder.blocks.0.norm").eps,
        "attention_bias": mixer.bias,
        "max_position_embeddings": config.context or length_of(rotary, 8192 if version < 3 else 131_072),
        "rope_parameters": write_rotary(rotary, key),
    }
    if version > 1:
        found["hidden_activation"] = found.pop("hidden_act")
    if version == 1:
        return found
    size = max((p.before + 1 for one in mixers if isinstance(p := pattern_of(one, "decoder"), Window)), default=4096)
    scale = round(mixer.scale.value**-2) if isinstance(mixer.scale, Times) and mixer.scale.value > 0 else key
    found |= {
        "query_pre_attn_scalar": scale,
        "sliding_window": size,
        "layer_types": [NEAR if near else FULL for near in windows],
        "attn_logit_softcapping": mixer.cap if version == 2 else None,
        "final_logit_softcapping": config.head.cap if isinstance(config.head, LM) else None,
    }
    if version == 3:
        local = ropes.get(True) or Rotary()
        found["rope_parameters"] = {FULL: write_rotary(rotary, key), NEAR: write_rotary(local, key)}
    return found


def rules(version: int, config: ModelConfig) -> Iterator[AnyRule]:
    if version == 1:
        yield from llama.rules(config)
        return
    assert config.decoder
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield from llama.attention_rules(f"{ours}.mixer", theirs)
        yield Rule(f"{ours}.mixer.norm_branch", f"{theirs}.post_attention_layernorm")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.pre_feedforward_layernorm")
        yield from llama.gated_rules(f"{ours}.feedforward.inner", f"{theirs}.mlp")
        yield Rule(f"{ours}.feedforward.norm_branch", f"{theirs}.post_feedforward_layernorm")
    yield from end_rules(config)


def _family(kind: str, title: str, version: int) -> Family:
    body = "Gemma3TextModel" if version == 3 else f"{title}Model"
    return Family(
        kind=kind,
        shape="decoder",
        heads={f"{title}ForCausalLM": "lm", body: "body"},
        text=Framing(before=("bos",)),
        prefix="model.",
        buffers=BUFFERS,
        read=partial(read, version),
        write=partial(write, version),
        rules=partial(rules, version),
    )


GEMMA = _family("gemma", "Gemma", 1)
GEMMA2 = _family("gemma2", "Gemma2", 2)
GEMMA3 = _family("gemma3_text", "Gemma3", 3)
