"""gpt-oss (OpenAI 2025): experts with a clamped SwiGLU, attention sinks, windows in every second layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anyformer import config as spec
from anyformer.config import ModelConfig, pattern_of
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import decoder_family, decoder_rules
from anyformer.interop.families.llama import FULL, NEAR, LlamaDefaults
from anyformer.interop.family import attention, expect, tile_layers
from anyformer.interop.weight_rules import AnyRule, Rule

DEFAULTS = LlamaDefaults(
    width=2880,
    depth=36,
    heads=64,
    ff=2880,
    vocab=201_088,
    kv_heads=8,
    key_width=64,
    length=131_072,
    eps=1e-5,
    theta=150_000.0,
    bos=None,
    eos=None,
)
YARN = spec.YarnScaling(factor=32.0, original_length=4096, truncate=False)


def read(fields: Fields) -> ModelConfig:
    fields.must("swiglu_alpha", 1.702)
    fields.must("hidden_act", "silu")
    fields.silent("output_router_logits")
    fields.alias("rope_scaling", "rope_parameters")
    given = fields.maybe("rope_parameters", dict)
    plain = llama.read(
        DEFAULTS, fields, None if given else spec.Rotary(theta=fields("rope_theta", 150_000.0), scaling=YARN)
    )
    stack, bias = expect(plain.decoder, spec.Stack, "decoder"), fields("attention_bias", True)
    width = expect(stack.blocks[0].feedforward, spec.Gated, "feedforward").hidden(plain.width)
    limit = fields("swiglu_limit", 7.0)
    experts = spec.Experts(
        count=fields("num_local_experts", 128),
        top_k=fields("num_experts_per_tok", 4),
        router=spec.SoftmaxTopK(bias=True),
        expert=spec.Gated(width=width, activation=spec.QuickGelu(), bias=True, limit=limit, offset=1.0),
        balance=fields("router_aux_loss_coef", 0.001),
    )
    changes = {"bias": bias, "output": spec.Projected(bias=bias), "sinks": True}
    full = stack.blocks[0].model_copy(
        update={"feedforward": experts, "mixer": attention(stack.blocks[0]).model_copy(update=changes)}
    )
    prefix, blocks = tile_layers(_layers(fields, full, stack.depth))
    return plain.model_copy(update={"decoder": stack.model_copy(update={"prefix": prefix, "blocks": blocks})})


def _layers(fields: Fields, full: spec.Block, depth: int) -> list[spec.Block]:
    window = spec.Window(before=fields("sliding_window", 128) - 1, after=0)
    near = full.model_copy(update={"mixer": attention(full).model_copy(update={"pattern": window})})
    default_kinds = [FULL if i % 2 else NEAR for i in range(depth)]
    return [near if kind == NEAR else full for kind in fields.layer_types(depth, default_kinds, (FULL, NEAR))]


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, spec.Stack, "decoder")
    layers = stack.unrolled()
    experts = expect(layers[0].feedforward, spec.Experts, "decoder.blocks.0.feedforward")
    network = expect(experts.expert, spec.Gated, "decoder.blocks.0.feedforward.expert")
    patterns = [pattern_of(attention(layer), "decoder") for layer in layers]
    dense = layers[0].model_copy(update={"feedforward": network})
    plain = config.model_copy(update={"decoder": stack.model_copy(update={"prefix": (), "blocks": (dense,)})})
    return llama.write(DEFAULTS, plain) | {
        "hidden_act": "silu",
        "attention_bias": attention(layers[0]).bias,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.balance,
        "swiglu_limit": network.limit,
        "sliding_window": max((p.before + 1 for p in patterns if isinstance(p, spec.Window)), default=128),
        "layer_types": [NEAR if isinstance(pattern, spec.Window) else FULL for pattern in patterns],
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
    assert config.decoder
    names = {**llama.ATTENTION, **llama.NORMS, "mixer.inner.sinks": "self_attn.sinks"}
    for i in range(config.decoder.depth):
        inner, theirs = f"decoder.blocks.{i}.feedforward.inner", f"model.layers.{i}.mlp"
        yield Rule(f"{inner}.router.linear", f"{theirs}.router")
        for layer, name, conversion in (("up", "gate_up_proj", _Turned(pairs=True)), ("down", "down_proj", _Turned())):
            yield Rule(f"{inner}.{layer}.weight", f"{theirs}.experts.{name}", conversion=conversion)
            yield Rule(f"{inner}.{layer}.bias", f"{theirs}.experts.{name}_bias", conversion=conversion)
    yield from decoder_rules("model.layers", names, config)


GPT_OSS = decoder_family("gpt_oss", "GptOss", read, write, rules)
