"""OLMo 2 (OLMo team 2024) and OLMo 3 (2025): Llama with norms after sublayers and of whole queries and keys."""

from functools import partial
from typing import Any

from anyformer.config import Block, ModelConfig, RMSNorm, Rotary, Stack, Window, pattern_of, position_of
from anyformer.interop.config_fields import Fields, write_rotary
from anyformer.interop.families import gemma, llama
from anyformer.interop.families.decoder_frame import decoder_family
from anyformer.interop.families.llama import FULL, NEAR, LlamaDefaults
from anyformer.interop.family import Family, attention, expect, tile_layers

DEFAULTS = LlamaDefaults(vocab=50_304, eps=1e-5, bos=None, eos=50_279, pad=1, biases=True)
THETA = 500_000.0  # of OLMo 3


def read(version: int, fields: Fields) -> ModelConfig:
    ropes = fields.rotaries(THETA, THETA) if version == 3 else None
    plain = llama.read(DEFAULTS, fields, ropes[0] if ropes else None)
    stack = expect(plain.decoder, Stack, "decoder")
    block = _normed(stack.blocks[0])
    changes: dict[str, Any] = {"final_norm": block.norm, "blocks": (block,)}
    if ropes:
        changes |= _layers(fields, block, stack.depth, ropes)
    return plain.model_copy(update={"decoder": stack.model_copy(update=changes)})


def _normed(block: Block) -> Block:
    """Return a block of Llama with the norms of OLMo, which multiply by γ in fp32."""
    norm = RMSNorm(eps=expect(block.norm, RMSNorm, "norm").eps, cast="after_scale")
    mixer = attention(block).model_copy(update={"qk_norm": norm, "qk_norm_over": "projection"})
    return block.model_copy(update={"mixer": mixer, "norm": norm, "placement": "branch"})


def _layers(fields: Fields, block: Block, depth: int, ropes: tuple[Rotary, Rotary]) -> dict[str, Any]:
    """Return the blocks and positions of OLMo 3, most of whose layers have a sliding window."""
    size, (full, local) = fields("sliding_window", 4096), ropes
    default_kinds = [FULL if (i + 1) % 4 == 0 else NEAR for i in range(depth)]
    kinds = fields.layer_types(depth, default_kinds, (FULL, NEAR))
    own = local if FULL in kinds and local != full else None
    window = {"pattern": Window(before=size - 1, after=0), "position": own}
    near = block.model_copy(update={"mixer": attention(block).model_copy(update=window)})
    prefix, blocks = tile_layers([block if kind == FULL else near for kind in kinds])
    return {"prefix": prefix, "blocks": blocks, "position": full if FULL in kinds else local}


def write(version: int, config: ModelConfig) -> dict[str, Any]:
    found = llama.write(DEFAULTS, config)
    if version == 2:
        return found
    stack = expect(config.decoder, Stack, "decoder")
    mixers = [attention(block) for block in stack.unrolled()]
    patterns = [pattern_of(mixer, "decoder") for mixer in mixers]
    kinds = [NEAR if isinstance(pattern, Window) else FULL for pattern in patterns]
    ropes = {
        kind: expect(position_of(mixer, stack), Rotary, "decoder.position")
        for kind, mixer in zip(kinds, mixers, strict=True)
    }
    key, some = mixers[0].widths(config.width)[0], next(iter(ropes.values()))
    return found | {
        "sliding_window": max((p.before + 1 for p in patterns if isinstance(p, Window)), default=4096),
        "layer_types": kinds,
        "rope_parameters": {kind: write_rotary(ropes.get(kind, some), key) for kind in (FULL, NEAR)},
    }


def _family(version: int) -> Family:
    return decoder_family(
        f"olmo{version}", f"Olmo{version}", partial(read, version), partial(write, version), gemma.RULES[2]
    )


OLMO2, OLMO3 = _family(2), _family(3)
