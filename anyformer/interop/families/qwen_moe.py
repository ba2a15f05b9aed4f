"""Qwen2-MoE (Qwen team 2024) and Qwen3-MoE (2025): layers, all or some, have experts; Qwen2's share one with a gate."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anyformer import config as spec
from anyformer.config import ConfigError, ModelConfig
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import decoder_family, decoder_rules
from anyformer.interop.families.llama import FULL, LlamaDefaults
from anyformer.interop.family import Family, attention, expect, map_blocks, tile_layers
from anyformer.interop.weight_rules import AnyRule, Rule, Stacked


@dataclass(frozen=True)
class Variant:
    """Defaults of one generation."""

    dense: LlamaDefaults
    count: tuple[str, int]  # number of experts, with the name of its field
    top_k: int
    width: int
    shared: int = 0  # width of the shared expert; 0: there is none
    normalize: bool = False  # weights of the chosen experts add up to 1


SIZES = replace(llama.QWEN, width=2048, depth=24, window=None, window_by_layer=False)
V2 = Variant(replace(SIZES, ff=5632, heads=16, kv_heads=16, qkv_bias=True), ("num_experts", 60), 4, 1408, shared=5632)
V3 = Variant(replace(SIZES, ff=6144, kv_heads=4, biases=True, qk_norm=True), ("num_local_experts", 128), 8, 768)


def read(variant: Variant, fields: Fields) -> ModelConfig:
    fields.must("use_sliding_window", False)
    fields.silent("sliding_window", "max_window_layers", "output_router_logits")
    second = variant.dense.qkv_bias  # of Qwen2, which has a field for it
    biased = replace(variant.dense, qkv_bias=fields("qkv_bias", True)) if second else variant.dense
    dense = llama.read(biased, fields)
    stack = expect(dense.decoder, spec.Stack, "decoder")
    if second:
        fields.layer_types(stack.depth, [FULL] * stack.depth, (FULL,))
    block, width = stack.blocks[0], fields("moe_intermediate_size", variant.width)
    network = expect(block.feedforward, spec.Gated, "feedforward")
    experts = spec.Experts(
        count=fields(*variant.count),
        top_k=fields("num_experts_per_tok", variant.top_k),
        router=spec.SoftmaxTopK(normalize=fields("norm_topk_prob", variant.normalize)),
        expert=network.model_copy(update={"width": width}),
        shared=_shared(variant, fields, width),
        shared_gate=variant.shared > 0,
        balance=fields("router_aux_loss_coef", 0.001),
    )
    step, bare = fields("decoder_sparse_step", 1), fields.maybe("mlp_only_layers", list) or []
    if not all(type(i) is int for i in bare):
        raise ConfigError([fields.fault("mlp_only_layers", f"= {shown(bare)}: must be numbers of layers")])
    mixed = block.model_copy(update={"feedforward": experts})
    layers = [block if i in bare or (i + 1) % step else mixed for i in range(stack.depth)]
    prefix, blocks = tile_layers(layers)
    return dense.model_copy(update={"decoder": stack.model_copy(update={"prefix": prefix, "blocks": blocks})})


def _shared(variant: Variant, fields: Fields, width: int) -> int:
    """Return the width of the shared expert, in widths of the others."""
    if not variant.shared:
        return 0
    size = fields("shared_expert_intermediate_size", variant.shared)
    if size % width:
        what = f"= {size}: must be a multiple of moe_intermediate_size = {width}"
        raise ConfigError([fields.fault("shared_expert_intermediate_size", what)])
    return size // width


def write(variant: Variant, config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, spec.Stack, "decoder")
    layers = stack.unrolled()
    experts = next((b.feedforward for b in layers if isinstance(b.feedforward, spec.Experts)), None)
    mixture = expect(experts, spec.Experts, "decoder.blocks.0.feedforward")
    bare = [i for i, block in enumerate(layers) if not isinstance(block.feedforward, spec.Experts)]
    network = layers[bare[0]].feedforward if bare else mixture.expert.model_copy(update={"width": variant.dense.ff})
    plain = map_blocks(config, lambda block: block.model_copy(update={"feedforward": network}))
    width = mixture.expert.hidden(config.width)
    found = llama.write(variant.dense, plain) | {
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.top_k,
        "moe_intermediate_size": width,
        "norm_topk_prob": expect(mixture.router, spec.SoftmaxTopK, "feedforward.router").normalize,
        "router_aux_loss_coef": mixture.balance,
        "mlp_only_layers": bare,
    }
    if variant.shared:
        found["shared_expert_intermediate_size"] = mixture.shared * width
    if variant.dense.qkv_bias:
        found["qkv_bias"] = attention(layers[0]).bias
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    for i, block in enumerate(config.decoder.unrolled()):
        ours, theirs = f"decoder.blocks.{i}.feedforward.inner", f"model.layers.{i}.mlp"
        yield from network_rules(ours, theirs, block.feedforward, config.width)
    yield from decoder_rules("model.layers", {**llama.ATTENTION, **llama.NORMS}, config)


def network_rules(ours: str, theirs: str, network: spec.FeedForward, width: int) -> Iterator[Rule]:
    if not isinstance(network, spec.Experts):
        yield from llama.gated_rules(ours, theirs)
        return
    inner, each = network.expert.hidden(width), [f"{theirs}.experts.{n}" for n in range(network.count)]
    yield Rule(f"{ours}.router.linear", f"{theirs}.gate")
    yield from llama.gated_rules(f"{ours}.shared", f"{theirs}.shared_expert")
    yield Rule(f"{ours}.shared_gate", f"{theirs}.shared_expert_gate")
    up = [f"{expert}.{part}_proj.weight" for expert in each for part in ("gate", "up")]
    yield Rule(f"{ours}.up.weight", *up, conversion=Stacked((inner, inner)))
    yield Rule(f"{ours}.down.weight", *(f"{expert}.down_proj.weight" for expert in each), conversion=Stacked((width,)))


def _family(version: int, variant: Variant) -> Family:
    return decoder_family(
        f"qwen{version}_moe", f"Qwen{version}Moe", partial(read, variant), partial(write, variant), rules
    )


QWEN2_MOE, QWEN3_MOE = _family(2, V2), _family(3, V3)
