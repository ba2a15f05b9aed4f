"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, many experts of which some are shared."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import decoder_family, decoder_rules
from anyformer.interop.families.llama_experts import network_rules
from anyformer.interop.family import Family, attention, expect, map_blocks, stack_of
from anyformer.interop.rotary_fields import read_rotary, temperature, write_rotary
from anyformer.interop.weight_rules import AnyRule, Reordered, pairs_to_halves

FIELDS = {  # by version
    version: llama.LlamaFields(kind=f"deepseek_v{version}", kv_heads=None, key_width=None) for version in (2, 3)
}


def read(version: int, fields: Fields) -> ModelConfig:
    for field, value in (("pretraining_tp", 1), ("mlp_bias", False), ("rope_interleave", True)):
        fields.must(field, value)
    fields.silent("output_router_logits", "num_nextn_predict_layers")
    family = FIELDS[version]
    fields.must("num_key_value_heads", fields("num_attention_heads"))
    position = read_rotary(fields, family.theta)
    bias, mixer = _attention(fields, _temperature(fields, position))
    block, depth = family.block(fields, bias=bias, mixer=mixer), family.read_depth(fields)
    bare, mixture = _experts(version, fields, expect(block.feedforward, spec.Gated, "feedforward"))
    mixed = block.model_copy(update={"feedforward": mixture})
    layers = [block if i < bare else mixed for i in range(depth)]
    return family.decoder(fields, layers, position)


def _temperature(fields: Fields, position: spec.Rotary) -> float:
    """Return the factor of the scores that YaRN adds in this family."""
    table = fields.maybe("rope_parameters", dict) or {}
    weight, scaling = table.get("mscale_all_dim"), position.scaling
    return temperature(scaling.factor, weight) ** 2 if isinstance(scaling, spec.YarnScaling) and weight else 1.0


def _attention(fields: Fields, tempered: float) -> tuple[bool, dict[str, Any]]:
    """Return whether attention has biases, and its other options."""
    content, rotated = fields("qk_nope_head_dim"), fields("qk_rope_head_dim")
    rank, key = fields.nullable("q_lora_rank", int), content + rotated
    fields.must("head_dim", rotated)
    fields.must("qk_head_dim", key)
    if rank is None:
        fields.must("attention_bias", False)  # then queries have none, and the others do
    scale: spec.Scale = spec.InvSqrtKey() if tempered == 1 else spec.Times(value=key**-0.5 * tempered)
    norm, compressed = spec.RMSNorm(eps=1e-6), fields("kv_lora_rank")
    return fields("attention_bias"), {
        "key_width": key,
        "value_width": fields("v_head_dim"),
        "compress": spec.Latent(rank=compressed, rotary_width=rotated, query_rank=rank, norm=norm),
        "scale": scale,
    }


def _experts(version: int, fields: Fields, dense: spec.Gated) -> tuple[int, spec.Experts]:
    """Return the number of first layers without experts, and the experts of the others."""
    scale = fields("routed_scaling_factor")
    groups, top_groups = (fields(name, fields.default(name) or 1) for name in ("n_group", "topk_group"))
    router: spec.Router
    if version == 3:
        normal = fields("norm_topk_prob")
        router = spec.SigmoidTopK(normalize=normal, scale=scale, groups=groups, top_groups=top_groups)
    else:
        fields.must("norm_topk_prob", False)  # `transformers` never normalises
        if not fields.one_of("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy"):
            groups, top_groups = 1, 1
        router = spec.SoftmaxTopK(normalize=False, scale=scale, groups=groups, top_groups=top_groups)
    return fields("first_k_dense_replace", least=0), spec.Experts(
        count=fields("n_routed_experts"),
        top_k=fields("num_experts_per_tok", fields.default("num_experts_per_tok") or 6),
        router=router,
        expert=dense.model_copy(update={"width": fields("moe_intermediate_size")}),
        shared=fields("n_shared_experts"),
    )


def write(version: int, config: ModelConfig) -> dict[str, Any]:
    networks = [layer.feedforward for layer in stack_of(config).unrolled()]
    experts = expect(
        next((n for n in networks if isinstance(n, spec.Experts)), None), spec.Experts, "decoder.blocks.0.feedforward"
    )
    dense = next((n for n in networks if isinstance(n, spec.Gated)), None)
    network = dense or experts.expert.model_copy(update={"width": FIELDS[version].default("intermediate_size")})
    parts = FIELDS[version].parts(map_blocks(config, lambda block: block.model_copy(update={"feedforward": network})))
    mixer, rotary, (key, value) = parts.mixer, parts.rotary, parts.mixer.widths(config.width)
    chooses: type[spec.SoftmaxTopK | spec.SigmoidTopK] = spec.SoftmaxTopK if version == 2 else spec.SigmoidTopK
    router = expect(experts.router, chooses, "decoder.blocks.0.feedforward.router")
    latent = expect(mixer.compress, spec.Latent, "decoder.blocks.0.mixer.compress")
    bare = next(i for i, network in enumerate(networks) if isinstance(network, spec.Experts))
    found = {
        **parts.fields(),
        **parts.rotary_fields(),
        "moe_intermediate_size": experts.expert.hidden(config.width),
        "num_key_value_heads": mixer.heads,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_rope_head_dim": latent.rotary_width,
        "qk_nope_head_dim": key - latent.rotary_width,
        "v_head_dim": value,
        "first_k_dense_replace": bare,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "n_shared_experts": experts.shared,
        "routed_scaling_factor": router.scale,
        "norm_topk_prob": router.normalize,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "hidden_act": name_of(experts.expert.activation),
        "attention_bias": mixer.bias,
        "rope_parameters": write_rotary(rotary, latent.rotary_width) | _weight(mixer, rotary, key),
    }
    return found if version == 3 else found | {"topk_method": "group_limited_greedy" if router.groups > 1 else "greedy"}


def _weight(mixer: spec.Attention, rotary: spec.Rotary, key: int) -> dict[str, float]:
    """Return `mscale_all_dim` for scores with a temperature."""
    if (
        not isinstance(mixer.scale, spec.Times)
        or not isinstance(rotary.scaling, spec.YarnScaling)
        or mixer.scale.value <= 0
    ):
        return {}
    excess = math.sqrt(mixer.scale.value * math.sqrt(key)) - 1
    return {"mscale_all_dim": round(excess / (0.1 * math.log(rotary.scaling.factor)), 9)}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    stack = stack_of(config)
    mixer = attention(stack.blocks[0])
    latent, (key, value) = mixer.compress, mixer.widths(config.width)
    if not isinstance(latent, spec.Latent):
        return
    content, rotated, h = key - latent.rotary_width, latent.rotary_width, mixer.heads
    queries = pairs_to_halves(h, key, rotated, first=content)
    first = torch.arange(latent.query_rank) if latent.query_rank else queries
    down = Reordered.parts(first, pairs_to_halves(1, latent.rank + rotated, rotated, first=latent.rank))
    rows = torch.arange(h * (content + value)).unflatten(0, (h, -1))  # of each head: those of its key, then its value
    up = Reordered((rows.numel(),), torch.cat((rows[:, :content].flatten(), rows[:, content:].flatten())))
    inner, ranked = "mixer.inner.latent", "q_a_proj" if latent.query_rank else "q_proj"
    names = {
        "mixer.norm_in": "input_layernorm",
        f"{inner}.down": (f"self_attn.{ranked}", "self_attn.kv_a_proj_with_mqa"),
        f"{inner}.query_norm": "self_attn.q_a_layernorm",
        f"{inner}.query_up": "self_attn.q_b_proj",
        f"{inner}.norm": "self_attn.kv_a_layernorm",
        f"{inner}.up": "self_attn.kv_b_proj",
        "mixer.inner.out": "self_attn.o_proj",
        "feedforward.norm_in": "post_attention_layernorm",
    }
    conversions = {f"{inner}.down": down, f"{inner}.query_up": Reordered.parts(queries), f"{inner}.up": up}
    yield from decoder_rules("model.layers", names, config, conversions=conversions)
    for i, block in enumerate(stack.unrolled()):
        ours, theirs = f"decoder.blocks.{i}.feedforward.inner", f"model.layers.{i}.mlp"
        yield from network_rules(ours, theirs, block.feedforward, config.width, shared="shared_experts")


def _family(version: int) -> Family:
    title = f"DeepseekV{version}"
    return decoder_family(f"deepseek_v{version}", title, partial(read, version), partial(write, version), rules)


DEEPSEEK_V2, DEEPSEEK_V3 = _family(2), _family(3)
