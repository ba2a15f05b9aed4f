"""Qwen3-MoE (Qwen team 2025): Qwen3 whose layers, all or some, have experts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anyformer.config import (
    Block,
    ConfigError,
    Experts,
    FeedForward,
    Gated,
    ModelConfig,
    SoftmaxTopK,
    Stack,
    hidden_width,
)
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families import llama
from anyformer.interop.family import Family, expect, tile_layers
from anyformer.interop.weight_rules import AnyRule, Rule, Stacked

SIZES = replace(llama.QWEN, width=2048, depth=24, ff=6144, kv_heads=4)
DEFAULTS = replace(SIZES, biases=True, qk_norm=True, window=None, window_by_layer=False)


def read(fields: Fields) -> ModelConfig:
    fields.must("use_sliding_window", False)
    fields.silent("sliding_window", "max_window_layers", "output_router_logits")
    dense = llama.read(DEFAULTS, fields)
    stack = expect(dense.decoder, Stack, "decoder")
    block = stack.blocks[0]
    network = expect(block.feedforward, Gated, "feedforward")
    experts = Experts(
        count=fields("num_local_experts", 128),
        top_k=fields("num_experts_per_tok", 8),
        router=SoftmaxTopK(normalize=fields("norm_topk_prob", False)),
        expert=network.model_copy(update={"width": fields("moe_intermediate_size", 768)}),
        balance=fields("router_aux_loss_coef", 0.001),
    )
    step, bare = fields("decoder_sparse_step", 1), fields.maybe("mlp_only_layers", list) or []
    if not all(type(i) is int for i in bare):
        raise ConfigError([fields.fault("mlp_only_layers", f"= {shown(bare)}: must be numbers of layers")])
    mixed = block.model_copy(update={"feedforward": experts})
    layers = [block if i in bare or (i + 1) % step else mixed for i in range(stack.depth)]
    prefix, blocks = tile_layers(layers)
    return dense.model_copy(update={"decoder": stack.model_copy(update={"prefix": prefix, "blocks": blocks})})


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    layers = stack.unrolled()
    experts = next((b.feedforward for b in layers if isinstance(b.feedforward, Experts)), None)
    mixture = expect(experts, Experts, "decoder.blocks.0.feedforward")
    bare = [i for i, block in enumerate(layers) if not isinstance(block.feedforward, Experts)]
    network = layers[bare[0]].feedforward if bare else mixture.expert.model_copy(update={"width": DEFAULTS.ff})

    def dense(block: Block) -> Block:
        return block.model_copy(update={"feedforward": network})

    changes = {"blocks": tuple(map(dense, stack.blocks)), "prefix": tuple(map(dense, stack.prefix))}
    plain = config.model_copy(update={"decoder": stack.model_copy(update=changes)})
    return llama.write(DEFAULTS, plain) | {
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.top_k,
        "moe_intermediate_size": hidden_width(mixture.expert, config.width),
        "norm_topk_prob": mixture.router.normalize,
        "router_aux_loss_coef": mixture.balance,
        "mlp_only_layers": bare,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    yield Rule("target.table", "model.embed_tokens")
    for i, block in enumerate(config.decoder.unrolled()):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield from llama.attention_rules(f"{ours}.mixer", theirs)
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from _network(f"{ours}.feedforward.inner", f"{theirs}.mlp", block.feedforward, config.width)
    yield from llama.end_rules(config)


def _network(ours: str, theirs: str, network: FeedForward, width: int) -> Iterator[Rule]:
    if not isinstance(network, Experts):
        yield from llama.gated_rules(ours, theirs)
        return
    inner, each = hidden_width(network.expert, width), [f"{theirs}.experts.{n}" for n in range(network.count)]
    yield Rule(f"{ours}.router.linear", f"{theirs}.gate")
    up = [f"{expert}.{part}_proj.weight" for expert in each for part in ("gate", "up")]
    yield Rule(f"{ours}.up.weight", *up, conversion=Stacked((inner, inner)))
    yield Rule(f"{ours}.down.weight", *(f"{expert}.down_proj.weight" for expert in each), conversion=Stacked((width,)))


QWEN3_MOE = Family(
    kind="qwen3_moe",
    shape="decoder",
    heads={"Qwen3MoeForCausalLM": "lm", "Qwen3MoeModel": "body"},
    prefix="model.",
    buffers=llama.BUFFERS,
    read=read,
    write=write,
    rules=rules,
)
