"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, many experts of which some are shared."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from anyformer.config import (
    Attention,
    Block,
    Experts,
    Gated,
    InvSqrtKey,
    Latent,
    ModelConfig,
    Projected,
    RMSNorm,
    Rotary,
    Router,
    Scale,
    SigmoidTopK,
    SoftmaxTopK,
    Stack,
    Times,
    Tokens,
    YarnScaling,
    position_of,
)
from anyformer.interop.config_fields import Fields, length_of, name_of, write_rotary
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import Ends, build_decoder, end_rules, llama_like
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.rotary_fields import temperature
from anyformer.interop.weight_rules import AnyRule, Reordered, Rule, Stacked, pairs_to_halves

SIZES = {  # where a config.json is silent: width, feed-forward, expert, layers, heads, vocabulary
    2: (4096, 11_008, 1407, 32, 32, 102_400),
    3: (7168, 18_432, 2048, 61, 128, 129_280),
}
EXPERTS = {2: (64, 6, 2, 0), 3: (256, 8, 1, 3)}  # experts, chosen, shared; layers without


def read(version: int, fields: Fields) -> ModelConfig:
    width, ff, _, depth, heads, vocab = SIZES[version]
    for field, value in (("pretraining_tp", 1), ("mlp_bias", False), ("rope_interleave", True)):
        fields.must(field, value)
    fields.silent("output_router_logits", "num_nextn_predict_layers")
    width, depth, heads = (
        fields("hidden_size", width),
        fields.depth("num_hidden_layers", depth),
        fields("num_attention_heads", heads),
    )
    fields.must("num_key_value_heads", heads)
    norm, position = RMSNorm(eps=fields("rms_norm_eps", 1e-6)), fields.rotary(10_000.0)
    mixer = _attention(fields, heads, _temperature(fields, position))
    act = fields.activation("hidden_act", "silu")
    dense = Gated(width=fields("intermediate_size", ff), activation=act)
    bare, mixture = _experts(version, fields, dense)
    block = Block(mixer=mixer, feedforward=dense, norm=norm)
    mixed = block.model_copy(update={"feedforward": mixture})
    first = 3 - version  # the id of <bos>, before that of <eos>
    layers = [block if i < bare else mixed for i in range(depth)]
    return build_decoder(fields, width, layers, position, Ends(vocab, tied=False, bos=first, eos=first + 1))


def _temperature(fields: Fields, position: Rotary) -> float:
    """Return the factor of the scores that YaRN adds in this family."""
    table = fields.maybe("rope_parameters", dict) or {}
    weight, scaling = table.get("mscale_all_dim"), position.scaling
    return temperature(scaling.factor, weight) ** 2 if isinstance(scaling, YarnScaling) and weight else 1.0


def _attention(fields: Fields, heads: int, tempered: float) -> Attention:
    content, rotated = fields("qk_nope_head_dim", 128), fields("qk_rope_head_dim", 64)
    rank, key = fields.nullable("q_lora_rank", 1536), content + rotated
    fields.must("head_dim", rotated)
    fields.must("qk_head_dim", key)
    if rank is None:
        fields.must("attention_bias", False)  # then queries have none, and the others do
    bias = fields("attention_bias", False)
    scale: Scale = InvSqrtKey() if tempered == 1 else Times(value=key**-0.5 * tempered)
    return Attention(
        heads=heads,
        key_width=key,
        value_width=fields("v_head_dim", 128),
        compress=Latent(
            rank=fields("kv_lora_rank", 512), rotary_width=rotated, query_rank=rank, norm=RMSNorm(eps=1e-6)
        ),
        bias=bias,
        output=Projected(bias=bias),
        scale=scale,
        dropout=fields("attention_dropout", 0.0),
    )


def _experts(version: int, fields: Fields, dense: Gated) -> tuple[int, Experts]:
    """Return the number of first layers without experts, and the experts of the others."""
    count, top, shared, bare = EXPERTS[version]
    scale = fields("routed_scaling_factor", 1.0 if version == 2 else 2.5)
    groups, top_groups = fields("n_group", 1 if version == 2 else 8), fields("topk_group", 1 if version == 2 else 4)
    router: Router
    if version == 3:
        normal = fields("norm_topk_prob", True)
        router = SigmoidTopK(normalize=normal, scale=scale, groups=groups, top_groups=top_groups)
    else:
        fields.must("norm_topk_prob", False)  # `transformers` never normalises
        if not fields.one_of("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy"):
            groups, top_groups = 1, 1
        router = SoftmaxTopK(normalize=False, scale=scale, groups=groups, top_groups=top_groups)
    width = fields("moe_intermediate_size", SIZES[version][2])
    return fields("first_k_dense_replace", bare, least=0), Experts(
        count=fields("n_routed_experts", count),
        top_k=fields("num_experts_per_tok", top),
        router=router,
        expert=dense.model_copy(update={"width": width}),
        shared=fields("n_shared_experts", shared),
    )


def write(version: int, config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    tokens, layers = expect(config.target, Tokens, "target"), stack.unrolled()
    networks = [layer.feedforward for layer in layers]
    experts = expect(
        next((n for n in networks if isinstance(n, Experts)), None), Experts, "decoder.blocks.0.feedforward"
    )
    dense = next((n for n in networks if isinstance(n, Gated)), None)
    block, mixer = layers[0], attention(layers[0])
    chooses: type[SoftmaxTopK | SigmoidTopK] = SoftmaxTopK if version == 2 else SigmoidTopK
    router = expect(experts.router, chooses, "decoder.blocks.0.feedforward.router")
    latent = expect(mixer.compress, Latent, "decoder.blocks.0.mixer.compress")
    rotary, (key, value) = expect(position_of(mixer, stack), Rotary, "decoder.position"), mixer.widths(config.width)
    bare = next(i for i, network in enumerate(networks) if isinstance(network, Experts))
    found = {
        "vocab_size": tokens.rows,
        "hidden_size": config.width,
        "intermediate_size": dense.hidden(config.width) if dense else SIZES[version][1],
        "moe_intermediate_size": experts.expert.hidden(config.width),
        "num_hidden_layers": stack.depth,
        "num_attention_heads": mixer.heads,
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
        "rms_norm_eps": expect(block.norm, RMSNorm, "decoder.blocks.0.norm").eps,
        "attention_bias": mixer.bias,
        "attention_dropout": mixer.dropout,
        "max_position_embeddings": config.context or length_of(rotary, 2048 if version == 2 else 4096),
        "rope_parameters": write_rotary(rotary, latent.rotary_width) | _weight(mixer, rotary, key),
        "tie_word_embeddings": config.tie == "output",
    }
    return found if version == 3 else found | {"topk_method": "group_limited_greedy" if router.groups > 1 else "greedy"}


def _weight(mixer: Attention, rotary: Rotary, key: int) -> dict[str, float]:
    """Return `mscale_all_dim` for scores with a temperature."""
    if not isinstance(mixer.scale, Times) or not isinstance(rotary.scaling, YarnScaling) or mixer.scale.value <= 0:
        return {}
    excess = math.sqrt(mixer.scale.value * math.sqrt(key)) - 1
    return {"mscale_all_dim": round(excess / (0.1 * math.log(rotary.scaling.factor)), 9)}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    mixer = attention(config.decoder.blocks[0])
    latent, (key, value) = mixer.compress, mixer.widths(config.width)
    if not isinstance(latent, Latent):
        return
    content, rotated, h = key - latent.rotary_width, latent.rotary_width, mixer.heads
    queries = pairs_to_halves(h, key, rotated, first=content)
    first = torch.arange(latent.query_rank) if latent.query_rank else queries
    down = Reordered.parts(first, pairs_to_halves(1, latent.rank + rotated, rotated, first=latent.rank))
    rows = torch.arange(h * (content + value)).unflatten(0, (h, -1))  # of each head: those of its key, then its value
    up = Reordered((rows.numel(),), torch.cat((rows[:, :content].flatten(), rows[:, content:].flatten())))
    for i, block in enumerate(config.decoder.unrolled()):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        name, ranked = f"{theirs}.self_attn", "q_a_proj" if latent.query_rank else "q_proj"
        inner = f"{ours}.mixer.inner.latent"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{inner}.down", f"{name}.{ranked}", f"{name}.kv_a_proj_with_mqa", conversion=down)
        yield Rule(f"{inner}.query_norm", f"{name}.q_a_layernorm")
        yield Rule(f"{inner}.query_up", f"{name}.q_b_proj", conversion=Reordered.parts(queries))
        yield Rule(f"{inner}.norm", f"{name}.kv_a_layernorm")
        yield Rule(f"{inner}.up", f"{name}.kv_b_proj", conversion=up)
        yield Rule(f"{ours}.mixer.inner.out", f"{name}.o_proj")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from _network(f"{ours}.feedforward.inner", f"{theirs}.mlp", block, config.width)
    yield from end_rules(config)


def _network(ours: str, theirs: str, block: Block, width: int) -> Iterator[Rule]:
    network = block.feedforward
    if not isinstance(network, Experts):
        yield from llama.gated_rules(ours, theirs)
        return
    inner, each = network.expert.hidden(width), [f"{theirs}.experts.{n}" for n in range(network.count)]
    yield Rule(f"{ours}.router.linear", f"{theirs}.gate")
    yield Rule(f"{ours}.router.bias", f"{theirs}.gate.e_score_correction_bias")
    up = [f"{expert}.{part}_proj.weight" for expert in each for part in ("gate", "up")]
    yield Rule(f"{ours}.up.weight", *up, conversion=Stacked((inner, inner)))
    yield Rule(f"{ours}.down.weight", *(f"{expert}.down_proj.weight" for expert in each), conversion=Stacked((width,)))
    yield from llama.gated_rules(f"{ours}.shared", f"{theirs}.shared_experts")


def _family(version: int) -> Family:
    title = f"DeepseekV{version}"
    return llama_like(f"deepseek_v{version}", title, partial(read, version), partial(write, version), rules)


DEEPSEEK_V2, DEEPSEEK_V3 = _family(2), _family(3)
