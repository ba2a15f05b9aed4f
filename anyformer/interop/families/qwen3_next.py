"""Qwen3-Next (Qwen team 2025): three layers of gated DeltaNet, then one of gated attention, all with experts.

Norms scale by 1 + γ. Rows of several projections are stored head by head: each head's queries and gates in `q_proj`,
and for each key head its queries, keys, values and gates in `in_proj_qkvz`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anyformer.config import Attention, GatedDelta, Mixer, ModelConfig, RMSNorm, Stack
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import qwen_moe
from anyformer.interop.families.decoder_frame import decoder_family, end_rules
from anyformer.interop.families.llama import FULL
from anyformer.interop.families.qwen_moe import Variant
from anyformer.interop.family import expect, map_blocks, tile_layers
from anyformer.interop.weight_rules import AnyRule, Reordered, Reshaped, Rule

LINEAR = "linear_attention"
DENSE = replace(
    qwen_moe.SIZES, ff=5632, depth=48, heads=16, kv_heads=2, key_width=256, biases=True, qk_norm=True, fraction=0.25
)
NEXT = Variant(DENSE, ("num_experts", 512), 10, 512, shared=512, normalize=True)


def read(fields: Fields) -> ModelConfig:
    fields.must("attention_bias", False)  # gates have no bias here
    plain = qwen_moe.read(NEXT, fields)
    stack = expect(plain.decoder, Stack, "decoder")
    depth, every = stack.depth, fields("full_attention_interval", 4)
    kinds = fields.layer_types(depth, [FULL if (i + 1) % every == 0 else LINEAR for i in range(depth)], (FULL, LINEAR))
    eps = expect(stack.final_norm, RMSNorm, "decoder.final_norm").eps
    norm = RMSNorm(eps=eps, offset=1.0, cast="after_scale")
    delta = GatedDelta(
        heads=fields("linear_num_value_heads", 32),
        key_heads=fields("linear_num_key_heads", 16),
        key_width=fields("linear_key_head_dim", 128),
        value_width=fields("linear_value_head_dim", 128),
        convolution=fields("linear_conv_kernel_dim", 4),
        norm=RMSNorm(eps=eps),
    )
    if LINEAR in kinds:
        fields.must("hidden_act", "silu", "swish")  # also the activation of the convolutions, which have no other
    gated = expect(stack.unrolled()[0].mixer, Attention, "mixer").model_copy(
        update={"gate": "element", "qk_norm": norm}
    )
    mixers: dict[str, Mixer] = {FULL: gated, LINEAR: delta}
    layers = [
        block.model_copy(update={"mixer": mixers[kind], "norm": norm})
        for block, kind in zip(stack.unrolled(), kinds, strict=True)
    ]
    prefix, blocks = tile_layers(layers)
    changes = {"prefix": prefix, "blocks": blocks, "final_norm": norm}
    return plain.model_copy(update={"decoder": stack.model_copy(update=changes)})


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    mixers = [block.mixer for block in stack.unrolled()]
    some = next((mixer for mixer in mixers if isinstance(mixer, Attention)), mixers[0])
    full = expect(some, Attention, "decoder.blocks.0.mixer")
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDelta)), None)
    attending = map_blocks(config, lambda block: block.model_copy(update={"mixer": full}))
    found = qwen_moe.write(NEXT, attending)
    found["layer_types"] = [LINEAR if isinstance(mixer, GatedDelta) else FULL for mixer in mixers]
    if delta is not None:
        key, value = delta.widths(config.width)
        found |= {"linear_num_value_heads": delta.heads, "linear_num_key_heads": delta.groups}
        found |= {"linear_key_head_dim": key, "linear_value_head_dim": value}
        found["linear_conv_kernel_dim"] = delta.convolution
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    for i, block in enumerate(config.decoder.unrolled()):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        if isinstance(block.mixer, GatedDelta):
            yield from _delta_rules(f"{ours}.mixer.inner", f"{theirs}.linear_attn", block.mixer, config.width)
        elif isinstance(block.mixer, Attention):
            yield from _attention_rules(f"{ours}.mixer.inner", f"{theirs}.self_attn", block.mixer, config.width)
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        network = f"{ours}.feedforward.inner"
        yield from qwen_moe.network_rules(network, f"{theirs}.mlp", block.feedforward, config.width)
    yield from end_rules(config)


def _attention_rules(ours: str, theirs: str, spec: Attention, width: int) -> Iterator[Rule]:
    key = spec.widths(width)[0]
    queries, gates = torch.arange(2 * spec.heads * key).unflatten(0, (spec.heads, 2, key)).unbind(1)
    rest = 2 * spec.heads * key + torch.arange(2 * spec.groups * key)
    sizes = (2 * spec.heads * key, spec.groups * key, spec.groups * key)
    order = torch.cat((queries.flatten(), rest, gates.flatten()))
    parts = (f"{theirs}.{part}_proj.weight" for part in "qkv")
    yield Rule(f"{ours}.qkv.weight", *parts, conversion=Reordered(sizes, order), also=(f"{ours}.gate.weight",))
    yield Rule(f"{ours}.out", f"{theirs}.o_proj")
    yield Rule(f"{ours}.q_norm", f"{theirs}.q_norm")
    yield Rule(f"{ours}.k_norm", f"{theirs}.k_norm")


def _delta_rules(ours: str, theirs: str, spec: GatedDelta, width: int) -> Iterator[Rule]:
    key, value = spec.widths(width)
    each = spec.heads // spec.groups * value  # values of a key head
    channels = spec.groups * 2 * key + spec.heads * value
    yield Rule(f"{ours}.qkvz", f"{theirs}.in_proj_qkvz", conversion=_by_head(spec.groups, (key, key, each, each)))
    shares = (spec.heads // spec.groups,) * 2
    yield Rule(f"{ours}.rates", f"{theirs}.in_proj_ba", conversion=_by_head(spec.groups, shares))
    conversion = Reshaped((channels, spec.convolution), (channels, 1, spec.convolution))
    yield Rule(f"{ours}.conv.weight", f"{theirs}.conv1d.weight", conversion=conversion)
    yield Rule(f"{ours}.log_a", f"{theirs}.A_log")
    yield Rule(f"{ours}.dt_bias", f"{theirs}.dt_bias")
    yield Rule(f"{ours}.norm", f"{theirs}.norm")
    yield Rule(f"{ours}.out", f"{theirs}.out_proj")


def _by_head(heads: int, sizes: tuple[int, ...]) -> Reordered:
    """Return the conversion of rows that are stored head by head, each head's parts of these sizes in a row."""
    rows: Tensor = torch.arange(heads * sum(sizes)).unflatten(0, (heads, -1))
    return Reordered.parts(torch.cat([part.flatten() for part in rows.split(sizes, dim=1)]))


QWEN3_NEXT = replace(
    decoder_family("qwen3_next", "Qwen3Next", read, write, rules),
    unused=(r"mtp\..*",),  # heads for further tokens, which `transformers` leaves out, too
)
