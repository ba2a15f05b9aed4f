"""Llama (Touvron et al. 2023) and its kin: Mistral, Qwen2, Qwen3. They differ in biases, windows and norms of heads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig, pattern_of
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import FieldNames
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import Family, Framing, attention
from anyformer.interop.weight_rules import Names, Rule, split_names

FULL, NEAR = "full_attention", "sliding_attention"
NAMES = FieldNames(kv_heads="num_key_value_heads", key_width="head_dim", eps="rms_norm_eps")

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
class LlamaDefaults(DecoderFields):
    """Defaults of a variant of Llama, and the fields that its config.json has."""

    names: FieldNames = NAMES
    network: type[spec.Gated] = spec.Gated
    norm: type[spec.RMSNorm] = spec.RMSNorm
    vocab: int = 32_000
    width: int = 4096
    depth: int = 32
    heads: int = 32
    ff: int = 11_008
    activation: str = "silu"
    eps: float = 1e-6
    theta: float = 10_000.0
    fraction: float | None = None  # of each head that is rotated; None: there is no such field
    bos: int | None = 1
    eos: int | None = 2
    biases: bool = False  # has a field for those of attention
    qkv_bias: bool = False  # always has those, and no others
    mlp_bias: bool = False  # has a field for those of the gates
    qk_norm: bool = False
    window: int | None = None  # where the field is left out; 0: none; None: there is no such field
    window_by_layer: bool = False  # only some layers have it


def read(defaults: LlamaDefaults, fields: Fields, position: spec.Rotary | None = None) -> ModelConfig:
    """Return the model; `position` replaces rotary positions that the fields give in another form."""
    fields.must("pretraining_tp", 1)
    bias = fields("attention_bias", False) if defaults.biases else defaults.qkv_bias
    mixer = {
        "output": spec.Projected(bias=bias and not defaults.qkv_bias),
        "qk_norm": defaults.normed(fields) if defaults.qk_norm else spec.NoNorm(),
    }
    gates = {"bias": fields("mlp_bias", False)} if defaults.mlp_bias else {}
    block = defaults.block(fields, bias=bias, mixer=mixer, feedforward=gates)
    layers = _windowed(defaults, fields, block)
    return defaults.decoder(fields, layers, position or fields.rotary(defaults.theta, defaults.fraction))


def _windowed(defaults: LlamaDefaults, fields: Fields, block: spec.Block) -> list[spec.Block]:
    """Return the layers, some or all with a sliding window."""
    depth = defaults.read_depth(fields)
    near = [False] * depth
    size = None if defaults.window is None else fields.nullable("sliding_window", defaults.window)
    if defaults.window_by_layer:
        used, first = fields("use_sliding_window", False), fields("max_window_layers", 28, least=0)
        default_kinds = [NEAR if used and i >= first else FULL for i in range(depth)]
        kinds = fields.layer_types(depth, default_kinds, (FULL, NEAR))
        near = [kind == NEAR for kind in kinds]
    elif size:
        near = [True] * depth
    if not any(near):
        return [block] * depth
    pattern = spec.Window(before=(size or 1) - 1, after=0)
    local = block.model_copy(update={"mixer": attention(block).model_copy(update={"pattern": pattern})})
    return [local if one else block for one in near]


def write(defaults: LlamaDefaults, config: ModelConfig) -> dict[str, Any]:
    parts = defaults.parts(config)
    patterns = [pattern_of(attention(layer), "decoder") for layer in parts.stack.unrolled()]
    sizes = [pattern.before + 1 for pattern in patterns if isinstance(pattern, spec.Window)]
    found = parts.fields() | parts.rotary_fields()
    if defaults.biases:
        found["attention_bias"] = parts.mixer.bias
    if defaults.mlp_bias:
        found["mlp_bias"] = parts.feedforward.bias
    if defaults.window is not None:
        found["sliding_window"] = max(sizes, default=None)
    if defaults.window_by_layer:
        found |= {"use_sliding_window": bool(sizes), "sliding_window": max(sizes, default=None)}
        found["layer_types"] = [NEAR if isinstance(pattern, spec.Window) else FULL for pattern in patterns]
    return found


def gated_rules(ours: str, theirs: str) -> Iterator[Rule]:
    """Yield the rules of a feed-forward by its own name."""
    yield Rule(f"{ours}.gate_up", f"{theirs}.gate_proj", f"{theirs}.up_proj")
    yield Rule(f"{ours}.down", f"{theirs}.down_proj")


def _family(kind: str, title: str, defaults: LlamaDefaults, text: Framing) -> Family:
    return decoder_family(kind, title, partial(read, defaults), partial(write, defaults), rules, text)


BEGUN = Framing(before=("bos",))
LLAMA = _family("llama", "Llama", LlamaDefaults(biases=True, mlp_bias=True), BEGUN)
MISTRAL = _family("mistral", "Mistral", LlamaDefaults(ff=14_336, kv_heads=8, length=131_072, window=4096), BEGUN)
QWEN = LlamaDefaults(
    ff=22_016, vocab=151_936, kv_heads=32, length=32_768, bos=None, eos=None, window=4096, window_by_layer=True
)
QWEN2 = _family("qwen2", "Qwen2", replace(QWEN, qkv_bias=True), Framing())
QWEN3 = _family("qwen3", "Qwen3", replace(QWEN, key_width=128, biases=True, qk_norm=True), Framing())
