"""gpt-oss (OpenAI 2025): experts with a clamped SwiGLU, attention sinks, windows in every second layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.block_fields import LayerKinds, sliding
from anyformer.interop.families.decoder_frame import decoder_family, decoder_rules
from anyformer.interop.families.llama import LlamaFields
from anyformer.interop.family import expect, stack_of, with_mixer, with_stack
from anyformer.interop.rotary_fields import FULL, NEAR
from anyformer.interop.weight_rules import AnyRule, Rule

FIELDS = LlamaFields(kind="gpt_oss", theta=150_000.0, bias="attention_bias")
YARN = spec.YarnScaling(factor=32.0, original_length=4096, truncate=False)


def read(fields: Fields) -> ModelConfig:
    fields.must("swiglu_alpha", 1.702)
    fields.must("hidden_act", "silu")
    fields.silent("output_router_logits")
    fields.alias("rope_scaling", "rope_parameters")
    given = fields.maybe("rope_parameters", dict)
    usual = None if given else spec.Rotary(theta=fields("rope_theta", FIELDS.theta), scaling=YARN)
    plain = llama.read(FIELDS, fields, usual)
    stack = stack_of(plain)
    width = expect(stack.blocks[0].feedforward, spec.Gated, "feedforward").hidden(plain.width)
    limit = fields("swiglu_limit", 7.0)
    experts = spec.Experts(
        count=fields("num_local_experts"),
        top_k=fields("num_experts_per_tok"),
        router=spec.SoftmaxTopK(bias=True),
        expert=spec.Gated(width=width, activation=spec.QuickGelu(), bias=True, limit=limit, offset=1.0),
        balance=fields("router_aux_loss_coef"),
    )
    full = with_mixer(stack.blocks[0], sinks=True).model_copy(update={"feedforward": experts})
    near = sliding(full, fields("sliding_window"))
    kinds = fields.layer_types(stack.depth, [FULL if i % 2 else NEAR for i in range(stack.depth)], (FULL, NEAR))
    return with_stack(plain, [near if kind == NEAR else full for kind in kinds])


def write(config: ModelConfig) -> dict[str, Any]:
    stack = stack_of(config)
    first, layers = stack.unrolled()[0], LayerKinds.of(stack.unrolled())
    experts = expect(first.feedforward, spec.Experts, "decoder.blocks.0.feedforward")
    network = expect(experts.expert, spec.Gated, "decoder.blocks.0.feedforward.expert")
    dense = first.model_copy(update={"feedforward": network})
    return llama.write(FIELDS, with_stack(config, [dense] * stack.depth)) | {
        "hidden_act": "silu",
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.balance,
        "swiglu_limit": network.limit,
        "sliding_window": layers.size or FIELDS.default("sliding_window"),
        "layer_types": layers.kinds,
    }


@dataclass(frozen=True)
class _Turned:
    """Matrices of all experts, [n, in, out] in theirs; with `pairs`, rows of the gate and of the other half in turn."""

    pairs: bool = False

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        x = x.mT if x.dim() == 3 else x
        return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if self.pairs else x

    def part(self, whole: Tensor) -> list[Tensor]:
        x = whole.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if self.pairs else whole
        return [x.mT if x.dim() == 3 else x]


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    names = {**llama.ATTENTION, **llama.NORMS, "mixer.inner.sinks": "self_attn.sinks"}
    for i in range(stack_of(config).depth):
        inner, theirs = f"decoder.blocks.{i}.feedforward.inner", f"model.layers.{i}.mlp"
        yield Rule(f"{inner}.router.linear", f"{theirs}.router")
        for layer, name, conversion in (("up", "gate_up_proj", _Turned(pairs=True)), ("down", "down_proj", _Turned())):
            yield Rule(f"{inner}.{layer}.weight", f"{theirs}.experts.{name}", conversion=conversion)
            yield Rule(f"{inner}.{layer}.bias", f"{theirs}.experts.{name}_bias", conversion=conversion)
    yield from decoder_rules("model.layers", names, config)


GPT_OSS = decoder_family("gpt_oss", "GptOss", read, write, rules)
