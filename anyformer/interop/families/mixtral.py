"""Mixtral (Jiang et al. 2024): Mistral with experts."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Block, Experts, Gated, ModelConfig, Stack
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import decoder_family, decoder_rules
from anyformer.interop.families.llama import LlamaDefaults
from anyformer.interop.family import Framing, expect, map_blocks
from anyformer.interop.weight_rules import AnyRule, Rule, Stacked

DEFAULTS = LlamaDefaults(ff=14_336, kv_heads=8, length=131_072, eps=1e-5, theta=1e6, window=0)


def read(fields: Fields) -> ModelConfig:
    fields.must("router_jitter_noise", 0.0)
    fields.silent("output_router_logits")
    count, top = fields("num_local_experts", 8), fields("num_experts_per_tok", 2)
    balance = fields("router_aux_loss_coef", 0.001)
    dense = llama.read(DEFAULTS, fields)

    def mixed(block: Block) -> Block:
        expert = expect(block.feedforward, Gated, "feedforward")
        return block.model_copy(update={"feedforward": Experts(count=count, top_k=top, expert=expert, balance=balance)})

    return map_blocks(dense, mixed)


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    experts = expect(stack.blocks[0].feedforward, Experts, "decoder.blocks.0.feedforward")

    def dense(block: Block) -> Block:
        return block.model_copy(update={"feedforward": expect(block.feedforward, Experts, "decoder.blocks").expert})

    return llama.write(DEFAULTS, map_blocks(config, dense)) | {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.balance,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    for i, block in enumerate(config.decoder.unrolled()):
        ours, theirs = f"decoder.blocks.{i}.feedforward.inner", f"model.layers.{i}.block_sparse_moe"
        experts = expect(block.feedforward, Experts, "feedforward")
        width, each = experts.expert.hidden(config.width), [f"{theirs}.experts.{n}" for n in range(experts.count)]
        yield Rule(f"{ours}.router.linear", f"{theirs}.gate")
        up = [f"{expert}.{part}.weight" for expert in each for part in ("w1", "w3")]
        yield Rule(f"{ours}.up.weight", *up, conversion=Stacked((width, width)))
        down = [f"{expert}.w2.weight" for expert in each]
        yield Rule(f"{ours}.down.weight", *down, conversion=Stacked((config.width,)))
    yield from decoder_rules("model.layers", {**llama.ATTENTION, **llama.NORMS}, config)


MIXTRAL = decoder_family("mixtral", "Mixtral", read, write, rules, Framing(before=("bos",)))
