"""Llama (Touvron et al. 2023) and its kin: Mistral, Qwen2, Qwen3. They differ in biases, windows and norms of heads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anyformer.config import (
    Attention,
    Block,
    Gated,
    ModelConfig,
    NoNorm,
    Projected,
    RMSNorm,
    Rotary,
    Window,
    pattern_of,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules, llama_like
from anyformer.interop.family import Family, Framing, attention, expect
from anyformer.interop.weight_rules import AnyRule, Rule

FULL, NEAR = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Defaults:
    """Defaults of a variant of Llama, and the fields that its config.json has."""

    width: int = 4096
    depth: int = 32
    ff: int = 11_008
    vocab: int = 32_000
    heads: int = 32
    kv_heads: int | None = None  # None: heads
    key_width: int | None = None  # None: d / heads
    length: int = 2048
    eps: float = 1e-6
    theta: float = 10_000.0
    fraction: float | None = None  # of each head that is rotated; None: there is no such field
    bos: int | None = 1
    eos: int | None = 2
    pad: int | None = None
    biases: bool = False  # has a field for those of attention
    qkv_bias: bool = False  # always has those, and no others
    mlp_bias: bool = False  # has a field for those of the gates
    qk_norm: bool = False
    window: int | None = None  # where the field is left out; 0: none; None: there is no such field
    window_by_layer: bool = False  # only some layers have it
    tied: bool = False


def read(defaults: Defaults, fields: Fields, position: Rotary | None = None) -> ModelConfig:
    """Return the model; `position` replaces rotary positions that the fields give in another form."""
    fields.must("pretraining_tp", 1)
    depth, width = fields.depth("num_hidden_layers", defaults.depth), fields("hidden_size", defaults.width)
    heads = fields("num_attention_heads", defaults.heads)
    norm = RMSNorm(eps=fields("rms_norm_eps", defaults.eps))
    bias = fields("attention_bias", False) if defaults.biases else defaults.qkv_bias
    mixer = Attention(
        heads=heads,
        kv_heads=fields("num_key_value_heads", defaults.kv_heads or heads),
        key_width=fields("head_dim", defaults.key_width or width // heads),
        bias=bias,
        output=Projected(bias=bias and not defaults.qkv_bias),
        qk_norm=norm if defaults.qk_norm else NoNorm(),
        dropout=fields("attention_dropout", 0.0),
    )
    feedforward = Gated(
        width=fields("intermediate_size", defaults.ff),
        activation=fields.activation("hidden_act", "silu"),
        bias=fields("mlp_bias", False) if defaults.mlp_bias else False,
    )
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm)
    layers = _windowed(defaults, fields, mixer, block, depth)
    ends = Ends(defaults.vocab, defaults.tied, defaults.pad, defaults.bos, defaults.eos)
    return build_decoder(fields, width, layers, position or fields.rotary(defaults.theta, defaults.fraction), ends)


def _windowed(defaults: Defaults, fields: Fields, mixer: Attention, block: Block, depth: int) -> list[Block]:
    """Return the layers, some or all with a sliding window."""
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
    pattern = Window(before=(size or 1) - 1, after=0)
    local = block.model_copy(update={"mixer": mixer.model_copy(update={"pattern": pattern})})
    return [local if one else block for one in near]


def write(defaults: Defaults, config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Gated)
    mixer, patterns = parts.mixer, [pattern_of(attention(layer), "decoder") for layer in parts.stack.unrolled()]
    sizes = [pattern.before + 1 for pattern in patterns if isinstance(pattern, Window)]
    found = {
        **parts.fields(),
        **parts.rotary_fields(defaults.length),
        "num_key_value_heads": mixer.groups,
        "head_dim": parts.key,
        "rms_norm_eps": expect(parts.block.norm, RMSNorm, "decoder.blocks.0.norm").eps,
    }
    if defaults.biases:
        found["attention_bias"] = mixer.bias
    if defaults.mlp_bias:
        found["mlp_bias"] = parts.feedforward.bias
    if defaults.window is not None:
        found["sliding_window"] = max(sizes, default=None)
    if defaults.window_by_layer:
        found |= {"use_sliding_window": bool(sizes), "sliding_window": max(sizes, default=None)}
        found["layer_types"] = [NEAR if isinstance(pattern, Window) else FULL for pattern in patterns]
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield from attention_rules(f"{ours}.mixer", theirs)
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from gated_rules(f"{ours}.feedforward.inner", f"{theirs}.mlp")
    yield from end_rules(config)


def attention_rules(ours: str, theirs: str) -> Iterator[Rule]:
    yield Rule(f"{ours}.norm_in", f"{theirs}.input_layernorm")
    yield Rule(f"{ours}.inner.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
    yield Rule(f"{ours}.inner.out", f"{theirs}.self_attn.o_proj")
    yield Rule(f"{ours}.inner.q_norm", f"{theirs}.self_attn.q_norm")
    yield Rule(f"{ours}.inner.k_norm", f"{theirs}.self_attn.k_norm")


def gated_rules(ours: str, theirs: str) -> Iterator[Rule]:
    yield Rule(f"{ours}.gate_up", f"{theirs}.gate_proj", f"{theirs}.up_proj")
    yield Rule(f"{ours}.down", f"{theirs}.down_proj")


def _family(kind: str, title: str, defaults: Defaults, text: Framing) -> Family:
    return llama_like(kind, title, partial(read, defaults), partial(write, defaults), rules, text)


BEGUN = Framing(before=("bos",))
LLAMA = _family("llama", "Llama", Defaults(biases=True, mlp_bias=True), BEGUN)
MISTRAL = _family("mistral", "Mistral", Defaults(ff=14_336, kv_heads=8, length=131_072, window=4096), BEGUN)
QWEN = Defaults(
    ff=22_016, vocab=151_936, kv_heads=32, length=32_768, bos=None, eos=None, window=4096, window_by_layer=True
)
QWEN2 = _family("qwen2", "Qwen2", replace(QWEN, qkv_bias=True), Framing())
QWEN3 = _family("qwen3", "Qwen3", replace(QWEN, key_width=128, biases=True, qk_norm=True), Framing())
