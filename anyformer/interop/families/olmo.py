"""OLMo 2 (OLMo team 2024) and OLMo 3 (2025): Llama with norms after sublayers and of whole queries and keys."""

from functools import partial
from typing import Any

from anyformer.config import Block, ModelConfig, RMSNorm, Rotary
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import gemma, llama
from anyformer.interop.families.block_fields import LayerKinds, sliding
from anyformer.interop.families.decoder_frame import decoder_family
from anyformer.interop.families.llama import LlamaFields
from anyformer.interop.family import Family, expect, stack_of, with_mixer, with_stack
from anyformer.interop.rotary_fields import FULL, NEAR, read_rotaries, write_rotaries

FIELDS = {version: LlamaFields(kind=f"olmo{version}", bias="attention_bias") for version in (2, 3)}
THETA = 500_000.0  # of OLMo 3


def read(version: int, fields: Fields) -> ModelConfig:
    ropes = read_rotaries(fields, THETA, THETA) if version == 3 else None
    plain = llama.read(FIELDS[version], fields, ropes[0] if ropes else None)
    stack = stack_of(plain)
    block = _normed(stack.blocks[0])
    if ropes is None:
        return with_stack(plain, [block] * stack.depth, final_norm=block.norm)
    layers, position = _layers(fields, block, stack.depth, *ropes)
    return with_stack(plain, layers, final_norm=block.norm, position=position)


def _normed(block: Block) -> Block:
    """Return a block of Llama with the norms of OLMo, which multiply by γ in fp32."""
    norm = RMSNorm(eps=expect(block.norm, RMSNorm, "norm").eps, cast="after_scale")
    mixed = with_mixer(block, qk_norm=norm, qk_norm_over="projection")
    return mixed.model_copy(update={"norm": norm, "placement": "branch"})


def _layers(fields: Fields, block: Block, depth: int, full: Rotary, local: Rotary) -> tuple[list[Block], Rotary]:
    """Return the layers and positions of OLMo 3, most of whose layers have a sliding window."""
    default_kinds = [FULL if (i + 1) % 4 == 0 else NEAR for i in range(depth)]
    kinds = fields.layer_types(depth, default_kinds, (FULL, NEAR))
    near = sliding(block, fields("sliding_window"), position=local if FULL in kinds and local != full else None)
    return [block if kind == FULL else near for kind in kinds], full if FULL in kinds else local


def write(version: int, config: ModelConfig) -> dict[str, Any]:
    found, stack = llama.write(FIELDS[version], config), stack_of(config)
    if version == 2:
        return found
    layers = LayerKinds.of(stack.unrolled())
    ropes = layers.ropes(stack)
    some = next(iter(ropes.values()))
    return found | {
        "sliding_window": layers.size or FIELDS[version].default("sliding_window"),
        "layer_types": layers.kinds,
        "rope_parameters": write_rotaries(dict.fromkeys((FULL, NEAR), some) | ropes, found["head_dim"]),
    }


def _family(version: int) -> Family:
    both = partial(read, version), partial(write, version)
    return decoder_family(f"olmo{version}", f"Olmo{version}", *both, gemma.RULES[2])


OLMO2, OLMO3 = _family(2), _family(3)
