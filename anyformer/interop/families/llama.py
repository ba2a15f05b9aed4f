"""Llama (Touvron et al. 2023) and its kin: Mistral, Qwen2, Qwen3 and SmolLM3.

The first three differ in biases, windows and norms of heads. In SmolLM3 (Bakouch et al. 2025) every fourth layer has no
positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anyformer import config as spec
from anyformer.config import Block, ConfigError, ModelConfig, NoPosition, Rotary, position_of
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families.block_fields import LayerKinds, sliding
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import PLAIN, Family, Framing, stack_of, with_mixer, with_stack
from anyformer.interop.rotary_fields import FULL, NEAR, read_rotary
from anyformer.interop.weight_rules import Names, Rule, split_names

ATTENTION: Names = {
    "mixer.norm_in": "input_layernorm",
    "mixer.inner.qkv": split_names("self_attn.{}_proj"),
    "mixer.inner.out": "self_attn.o_proj",
}
NORMS: Names = {
    "mixer.inner.q_norm": "self_attn.q_norm",
    "mixer.inner.k_norm": "self_attn.k_norm",
    "feedforward.norm_in": "post_attention_layernorm",
}
GATED: Names = {
    "feedforward.inner.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "feedforward.inner.down": "mlp.down_proj",
}
LAYER = {**ATTENTION, **NORMS, **GATED}
rules = partial(decoder_rules, "model.layers", LAYER)


@dataclass(frozen=True, kw_only=True)
class LlamaFields(DecoderFields):
    """The fields of a variant of Llama."""

    kv_heads: str | None = "num_key_value_heads"
    key_width: str | None = "head_dim"
    network: type[spec.Gated] = spec.Gated
    norm: type[spec.RMSNorm] = spec.RMSNorm
    eps: str | None = "rms_norm_eps"
    theta: float = 10_000.0
    fraction: float | None = None  # of each head that is rotated; None: there is no such field
    qkv_bias: bool = False  # queries, keys and values have one, and the output none
    qk_norm: bool = False
    window: bool = False  # there is a field for it
    window_by_layer: bool = False  # only some layers have it


def read(family: LlamaFields, fields: Fields, position: spec.Rotary | None = None) -> ModelConfig:
    """Return the model; `position` replaces rotary positions that the fields give in another form."""
    fields.must("pretraining_tp", 1)
    mixer: dict[str, Any] = {"qk_norm": family.normed(fields)} if family.qk_norm else {}
    mixer |= {"output": spec.Projected()} if family.qkv_bias else {}
    layers = _windowed(family, fields, family.block(fields, bias=family.qkv_bias, mixer=mixer))
    return family.decoder(fields, layers, position or read_rotary(fields, family.theta, family.fraction))


def _windowed(family: LlamaFields, fields: Fields, block: spec.Block) -> list[spec.Block]:
    """Return the layers, some or all with a sliding window."""
    depth = family.read_depth(fields)
    size = fields.nullable("sliding_window", int) if family.window else None
    kinds = [NEAR if size else FULL] * depth
    if family.window_by_layer:
        used, first = fields("use_sliding_window"), fields("max_window_layers", 28, least=0)
        kinds = fields.layer_types(depth, [NEAR if used and i >= first else FULL for i in range(depth)], (FULL, NEAR))
    return [sliding(block, size or 1) if kind == NEAR else block for kind in kinds]


def write(family: LlamaFields, config: ModelConfig) -> dict[str, Any]:
    parts = family.parts(config)
    layers = LayerKinds.of(parts.stack.unrolled())
    found = parts.fields() | parts.rotary_fields()
    if family.window:
        found["sliding_window"] = layers.size
    if family.window_by_layer:
        found |= {"use_sliding_window": layers.size is not None, "layer_types": layers.kinds}
    return found


def gated_rules(ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a feed-forward by its own name."""
    yield Rule(f"{ours}.gate_up", f"{theirs}.gate_proj", f"{theirs}.up_proj")
    yield Rule(f"{ours}.down", f"{theirs}.down_proj")


def _family(title: str, fields: LlamaFields, text: Framing = PLAIN) -> Family:
    return decoder_family(fields.kind, title, partial(read, fields), partial(write, fields), rules, text)


BEGUN = Framing(before=("bos",))
LLAMA = _family("Llama", LlamaFields(kind="llama", bias="attention_bias", network_bias="mlp_bias"), BEGUN)
MISTRAL = _family("Mistral", LlamaFields(kind="mistral", window=True), BEGUN)
QWEN2_FIELDS = LlamaFields(kind="qwen2", qkv_bias=True, window=True, window_by_layer=True)
QWEN2 = _family("Qwen2", QWEN2_FIELDS)
QWEN3 = _family("Qwen3", replace(QWEN2_FIELDS, kind="qwen3", bias="attention_bias", qkv_bias=False, qk_norm=True))

# -- SmolLM3 -----------------------------------------------------------------------------------------------------------

SMOLLM3_FIELDS = LlamaFields(kind="smollm3", theta=2e6, bias="attention_bias", network_bias="mlp_bias")


def _read_smollm3(fields: Fields) -> ModelConfig:
    dense = read(SMOLLM3_FIELDS, fields)
    stack = stack_of(dense)
    every, block = fields("no_rope_layer_interval"), stack.blocks[0]
    rotates = fields.maybe("no_rope_layers", list) or [int((i + 1) % every != 0) for i in range(stack.depth)]
    if len(rotates) != stack.depth or not all(flag in (0, 1) for flag in rotates):
        what = f"must be {stack.depth} of 0 and 1"
        raise ConfigError([fields.fault("no_rope_layers", f"= {shown(rotates)}: {what}")])
    size = fields.maybe("sliding_window", int) if fields("use_sliding_window") else None
    fields.silent("sliding_window")
    default_kinds = [NEAR if size and not rotated else FULL for rotated in rotates]
    kinds = fields.layer_types(stack.depth, default_kinds, (FULL, NEAR))
    if NEAR in kinds and not size:
        raise ConfigError([fields.fault("layer_types", f"has {NEAR}: needs use_sliding_window and sliding_window")])

    def layer(rotated: int, kind: str) -> Block:
        placed = with_mixer(block, position=NoPosition() if any(rotates) and not rotated else None)
        return sliding(placed, size or 1) if kind == NEAR else placed

    layers = [layer(*one) for one in zip(rotates, kinds, strict=True)]
    return with_stack(dense, layers, position=stack.position if any(rotates) else NoPosition())


def _write_smollm3(config: ModelConfig) -> dict[str, Any]:
    stack = stack_of(config)
    layers = LayerKinds.of(stack.unrolled())
    schemes = [position_of(mixer, stack) for mixer in layers.mixers]
    rotary = next((scheme for scheme in schemes if isinstance(scheme, Rotary)), Rotary(theta=SMOLLM3_FIELDS.theta))
    alike = with_stack(config, [with_mixer(stack.unrolled()[0], position=None)] * stack.depth, position=rotary)
    return write(SMOLLM3_FIELDS, alike) | {
        "no_rope_layers": [int(isinstance(scheme, Rotary)) for scheme in schemes],
        "use_sliding_window": layers.size is not None,
        "sliding_window": layers.size,
        "layer_types": layers.kinds,
    }


SMOLLM3 = decoder_family("smollm3", "SmolLM3", _read_smollm3, _write_smollm3, rules)
