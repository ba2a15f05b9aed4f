"""SmolLM3 (Bakouch et al. 2025): Llama in which every fourth layer has no positions."""

from typing import Any

from anyformer.config import Block, ConfigError, ModelConfig, NoPosition, Rotary, Stack, Window, pattern_of, position_of
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import decoder_family
from anyformer.interop.families.llama import FULL, NEAR, LlamaDefaults
from anyformer.interop.family import attention, expect, tile_layers

DEFAULTS = LlamaDefaults(
    width=2048,
    depth=36,
    heads=16,
    vocab=128_256,
    kv_heads=4,
    length=32_768,
    theta=2e6,
    bos=128_000,
    eos=128_001,
    pad=128_004,
    biases=True,
    mlp_bias=True,
    tied=True,
)


def read(fields: Fields) -> ModelConfig:
    dense = llama.read(DEFAULTS, fields)
    stack = expect(dense.decoder, Stack, "decoder")
    every, block = fields("no_rope_layer_interval", 4), stack.blocks[0]
    rotates = fields.maybe("no_rope_layers", list) or [int((i + 1) % every != 0) for i in range(stack.depth)]
    if len(rotates) != stack.depth or not all(flag in (0, 1) for flag in rotates):
        what = f"must be {stack.depth} of 0 and 1"
        raise ConfigError([fields.fault("no_rope_layers", f"= {shown(rotates)}: {what}")])
    size = fields.maybe("sliding_window", int) if fields("use_sliding_window", False) else None
    fields.silent("sliding_window")
    default_kinds = [NEAR if size and not rotated else FULL for rotated in rotates]
    kinds = fields.layer_types(stack.depth, default_kinds, (FULL, NEAR))
    if NEAR in kinds and not size:
        raise ConfigError([fields.fault("layer_types", f"has {NEAR}: needs use_sliding_window and sliding_window")])

    def layer(rotated: int, kind: str) -> Block:
        window = Window(before=(size or 1) - 1, after=0) if kind == NEAR else None
        position = NoPosition() if any(rotates) and not rotated else None
        changes = {"pattern": window, "position": position}
        return block.model_copy(update={"mixer": attention(block).model_copy(update=changes)})

    prefix, blocks = tile_layers([layer(*one) for one in zip(rotates, kinds, strict=True)])
    position = stack.position if any(rotates) else NoPosition()
    changes = {"prefix": prefix, "blocks": blocks, "position": position}
    return dense.model_copy(update={"decoder": stack.model_copy(update=changes)})


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    layers = stack.unrolled()
    mixers = [attention(layer) for layer in layers]
    patterns = [pattern_of(mixer, "decoder") for mixer in mixers]
    schemes = [position_of(mixer, stack) for mixer in mixers]
    rotary = next((scheme for scheme in schemes if isinstance(scheme, Rotary)), Rotary(theta=DEFAULTS.theta))
    first = layers[0].model_copy(update={"mixer": mixers[0].model_copy(update={"position": None})})
    alike = stack.model_copy(update={"prefix": (), "blocks": (first,), "position": rotary})
    sizes = [pattern.before + 1 for pattern in patterns if isinstance(pattern, Window)]
    return llama.write(DEFAULTS, config.model_copy(update={"decoder": alike})) | {
        "no_rope_layers": [int(isinstance(scheme, Rotary)) for scheme in schemes],
        "use_sliding_window": bool(sizes),
        "sliding_window": max(sizes, default=None),
        "layer_types": [NEAR if isinstance(pattern, Window) else FULL for pattern in patterns],
    }


SMOLLM3 = decoder_family("smollm3", "SmolLM3", read, write, llama.rules)
