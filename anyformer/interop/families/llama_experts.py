"""Llama with experts: Mixtral (Jiang et al. 2024), Qwen2-MoE (Qwen team 2024), Qwen3-MoE (2025) and Qwen3-Next (2025).

Layers of Qwen, all or some, have experts; Qwen2's share one with a gate. Mixtral is Mistral with experts.

Qwen3-Next has three layers of gated DeltaNet, then one of gated attention, all with experts. Norms scale by 1 + γ. Rows
of several projections are stored head by head: each head's queries and gates in `q_proj`, and for each key head its
queries, keys, values and gates in `in_proj_qkvz`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anyformer import config as spec
from anyformer.config import Attention, Block, ConfigError, Experts, Gated, GatedDelta, Mixer, ModelConfig, RMSNorm
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import decoder_family, decoder_rules, end_rules
from anyformer.interop.families.llama import LlamaFields
from anyformer.interop.family import Family, Framing, expect, map_blocks, stack_of, with_stack
from anyformer.interop.rotary_fields import FULL
from anyformer.interop.weight_rules import AnyRule, Reordered, Reshaped, Rule, Stacked


@dataclass(frozen=True)
class Variant:
    """The fields of one generation."""

    dense: LlamaFields
    count: str = "num_experts"
    shared: bool = False  # there is an expert for all tokens, with a gate


V2 = Variant(LlamaFields(kind="qwen2_moe", bias="qkv_bias", qkv_bias=True), shared=True)
V3 = Variant(LlamaFields(kind="qwen3_moe", bias="attention_bias", qk_norm=True), "num_local_experts")


def read(variant: Variant, fields: Fields) -> ModelConfig:
    fields.must("use_sliding_window", False)
    fields.silent("sliding_window", "max_window_layers", "output_router_logits")
    dense = llama.read(variant.dense, fields)
    stack = stack_of(dense)
    if variant is V2:
        fields.layer_types(stack.depth, [FULL] * stack.depth, (FULL,))
    block, width = stack.blocks[0], fields("moe_intermediate_size")
    network = expect(block.feedforward, spec.Gated, "feedforward")
    experts = spec.Experts(
        count=fields(variant.count),
        top_k=fields("num_experts_per_tok"),
        router=spec.SoftmaxTopK(normalize=fields("norm_topk_prob")),
        expert=network.model_copy(update={"width": width}),
        shared=_shared(fields, width) if variant.shared else 0,
        shared_gate=variant.shared,
        balance=fields("router_aux_loss_coef"),
    )
    step, bare = fields("decoder_sparse_step"), fields.maybe("mlp_only_layers", list) or []
    if not all(type(i) is int for i in bare):
        raise ConfigError([fields.fault("mlp_only_layers", f"= {shown(bare)}: must be numbers of layers")])
    mixed = block.model_copy(update={"feedforward": experts})
    return with_stack(dense, [block if i in bare or (i + 1) % step else mixed for i in range(stack.depth)])


def _shared(fields: Fields, width: int) -> int:
    """Return the width of the shared expert, in widths of the others."""
    size: int = fields("shared_expert_intermediate_size")
    if size % width:
        what = f"= {size}: must be a multiple of moe_intermediate_size = {width}"
        raise ConfigError([fields.fault("shared_expert_intermediate_size", what)])
    return size // width


def write(variant: Variant, config: ModelConfig) -> dict[str, Any]:
    layers = stack_of(config).unrolled()
    experts = next((b.feedforward for b in layers if isinstance(b.feedforward, spec.Experts)), None)
    mixture = expect(experts, spec.Experts, "decoder.blocks.0.feedforward")
    bare = [i for i, block in enumerate(layers) if not isinstance(block.feedforward, spec.Experts)]
    usual = variant.dense.default("intermediate_size")
    network = layers[bare[0]].feedforward if bare else mixture.expert.model_copy(update={"width": usual})
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
    return found | ({"shared_expert_intermediate_size": mixture.shared * width} if variant.shared else {})


def expert_rules(
    config: ModelConfig,
    network: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_expert",
) -> Iterator[AnyRule]:
    """Yield the rules of Llama with experts in some layers or all, by the name of a feed-forward and its parts."""
    for i, block in enumerate(stack_of(config).unrolled()):
        ours, theirs = f"decoder.blocks.{i}.feedforward.inner", f"model.layers.{i}.{network}"
        yield from network_rules(ours, theirs, block.feedforward, config.width, parts, shared)
    yield from decoder_rules("model.layers", {**llama.ATTENTION, **llama.NORMS}, config)


def network_rules(
    ours: str,
    theirs: str,
    network: spec.FeedForward,
    width: int,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_expert",
) -> Iterator[Rule]:
    if not isinstance(network, spec.Experts):
        yield from llama.gated_rules(ours, theirs)
        return
    (gate, up, down), inner = parts, network.expert.hidden(width)
    each = [f"{theirs}.experts.{n}" for n in range(network.count)]
    yield Rule(f"{ours}.router.linear", f"{theirs}.gate")
    yield Rule(f"{ours}.router.bias", f"{theirs}.gate.e_score_correction_bias")
    yield from llama.gated_rules(f"{ours}.shared", f"{theirs}.{shared}")
    yield Rule(f"{ours}.shared_gate", f"{theirs}.{shared}_gate")
    both = [f"{expert}.{part}.weight" for expert in each for part in (gate, up)]
    yield Rule(f"{ours}.up.weight", *both, conversion=Stacked((inner, inner)))
    yield Rule(f"{ours}.down.weight", *(f"{expert}.{down}.weight" for expert in each), conversion=Stacked((width,)))


def _family(title: str, variant: Variant) -> Family:
    kind = variant.dense.kind
    return decoder_family(kind, title, partial(read, variant), partial(write, variant), expert_rules)


QWEN2_MOE, QWEN3_MOE = _family("Qwen2Moe", V2), _family("Qwen3Moe", V3)

# -- Mixtral -----------------------------------------------------------------------------------------------------------

MIXTRAL_FIELDS = LlamaFields(kind="mixtral", theta=1e6, window=True)


def _read_mixtral(fields: Fields) -> ModelConfig:
    fields.must("router_jitter_noise", 0.0)
    fields.silent("output_router_logits")
    count, top = fields("num_local_experts"), fields("num_experts_per_tok")
    balance = fields("router_aux_loss_coef")

    def mixed(block: Block) -> Block:
        expert = expect(block.feedforward, Gated, "feedforward")
        return block.model_copy(update={"feedforward": Experts(count=count, top_k=top, expert=expert, balance=balance)})

    return map_blocks(llama.read(MIXTRAL_FIELDS, fields), mixed)


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    experts = expect(stack_of(config).blocks[0].feedforward, Experts, "decoder.blocks.0.feedforward")

    def dense(block: Block) -> Block:
        return block.model_copy(update={"feedforward": expect(block.feedforward, Experts, "decoder.blocks").expert})

    return llama.write(MIXTRAL_FIELDS, map_blocks(config, dense)) | {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.balance,
    }


def _mixtral_rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from expert_rules(config, "block_sparse_moe", ("w1", "w3", "w2"))


MIXTRAL = decoder_family("mixtral", "Mixtral", _read_mixtral, _write_mixtral, _mixtral_rules, Framing(before=("bos",)))

# -- Qwen3-Next --------------------------------------------------------------------------------------------------------

LINEAR = "linear_attention"
NEXT = Variant(LlamaFields(kind="qwen3_next", bias="attention_bias", qk_norm=True, fraction=0.25), shared=True)


def _read_qwen3_next(fields: Fields) -> ModelConfig:
    fields.must("attention_bias", False)  # gates have no bias here
    plain = read(NEXT, fields)
    stack = stack_of(plain)
    depth, every = stack.depth, fields("full_attention_interval", 4)
    kinds = fields.layer_types(depth, [FULL if (i + 1) % every == 0 else LINEAR for i in range(depth)], (FULL, LINEAR))
    eps = expect(stack.final_norm, RMSNorm, "decoder.final_norm").eps
    norm = RMSNorm(eps=eps, offset=1.0, cast="after_scale")
    delta = GatedDelta(
        heads=fields("linear_num_value_heads"),
        key_heads=fields("linear_num_key_heads"),
        key_width=fields("linear_key_head_dim"),
        value_width=fields("linear_value_head_dim"),
        convolution=fields("linear_conv_kernel_dim"),
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
    return with_stack(plain, layers, final_norm=norm)


def _write_qwen3_next(config: ModelConfig) -> dict[str, Any]:
    mixers = [block.mixer for block in stack_of(config).unrolled()]
    some = next((mixer for mixer in mixers if isinstance(mixer, Attention)), mixers[0])
    full = expect(some, Attention, "decoder.blocks.0.mixer")
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDelta)), None)
    attending = map_blocks(config, lambda block: block.model_copy(update={"mixer": full}))
    found = write(NEXT, attending)
    found["layer_types"] = [LINEAR if isinstance(mixer, GatedDelta) else FULL for mixer in mixers]
    if delta is not None:
        key, value = delta.widths(config.width)
        found |= {"linear_num_value_heads": delta.heads, "linear_num_key_heads": delta.groups}
        found |= {"linear_key_head_dim": key, "linear_value_head_dim": value}
        found["linear_conv_kernel_dim"] = delta.convolution
    return found


def _qwen3_next_rules(config: ModelConfig) -> Iterator[AnyRule]:
    for i, block in enumerate(stack_of(config).unrolled()):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        if isinstance(block.mixer, GatedDelta):
            yield from _delta_rules(f"{ours}.mixer.inner", f"{theirs}.linear_attn", block.mixer, config.width)
        elif isinstance(block.mixer, Attention):
            yield from _attention_rules(f"{ours}.mixer.inner", f"{theirs}.self_attn", block.mixer, config.width)
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        network = f"{ours}.feedforward.inner"
        yield from network_rules(network, f"{theirs}.mlp", block.feedforward, config.width)
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


UNUSED = (r"mtp\..*",)  # heads for further tokens, which `transformers` leaves out, too
QWEN3_NEXT = decoder_family(
    "qwen3_next", "Qwen3Next", _read_qwen3_next, _write_qwen3_next, _qwen3_next_rules, unused=UNUSED
)
