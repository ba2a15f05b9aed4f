"""Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, one key/value head or a few."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    Alibi,
    Attention,
    Block,
    LayerNorm,
    ModelConfig,
    Order,
    Parallel,
    Plain,
    Projected,
    Sequential,
    position_of,
)
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.families.bloom import TABLE
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.families.neox import fused_rules
from anyformer.interop.family import Family, attention
from anyformer.interop.weight_rules import AnyRule, Grouped, Rule

ENDS = Ends(vocab=65_024, tied=True, bos=11, eos=11)


def read(fields: Fields) -> ModelConfig:
    fields.alias("n_embed", "hidden_size")
    width, heads, bias = fields("hidden_size", 4544), fields("num_attention_heads", 71), fields("bias", False)
    new, drop = fields("new_decoder_architecture", False), fields("hidden_dropout", 0.0)
    groups, single = fields("num_kv_heads", heads), fields("multi_query", True)
    beside, norms = fields("parallel_attn", True), fields("num_ln_in_parallel_attn", 2 if new else 1)
    order: Order = Parallel(shared_norm=norms == 1) if new or beside else Sequential()
    norm = LayerNorm(eps=fields("layer_norm_epsilon", 1e-5))
    mixer = Attention(
        heads=heads,
        kv_heads=groups if new else 1 if single else heads,
        bias=bias,
        output=Projected(bias=bias),
        dropout=fields("attention_dropout", 0.0),
    )
    feedforward = Plain(
        width=fields("ffn_hidden_size", 4 * width), activation=fields.activation("activation", "gelu"), bias=bias
    )
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, order=order, dropout=drop)
    alibi = Alibi(factor=max(width // heads, 1) ** -0.5, rounded=True) if fields("alibi", False) else None
    if alibi:
        fields.silent("rope_parameters", "rope_scaling", "rope_theta")  # then not used by `transformers`
    layers = [block] * fields.depth("num_hidden_layers", 32)
    return build_decoder(fields, width, layers, alibi or fields.rotary(10_000.0), ENDS)


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    block, mixer = parts.block, parts.mixer
    if isinstance(position_of(mixer, parts.stack), Alibi):
        about = {"alibi": True, "max_position_embeddings": config.context or 2048}
    else:
        about = parts.rotary_fields(2048)
    norms = 1 if block.order == Parallel(shared_norm=True) else 2
    new = isinstance(block.order, Parallel) and (norms == 2 or mixer.groups not in (1, mixer.heads))
    found = {
        "vocab_size": parts.tokens.rows,
        "hidden_size": config.width,
        "num_hidden_layers": parts.stack.depth,
        "num_attention_heads": mixer.heads,
        "num_kv_heads": mixer.groups,
        "multi_query": mixer.groups == 1,
        "new_decoder_architecture": new,
        "parallel_attn": isinstance(block.order, Parallel),
        "ffn_hidden_size": parts.ff,
        "activation": name_of(parts.feedforward.activation),
        "bias": mixer.bias,
        "layer_norm_epsilon": parts.eps,
        "hidden_dropout": block.dropout,
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
        **about,
    }
    return found | {"num_ln_in_parallel_attn": norms} if new else found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    block = config.decoder.blocks[0]
    mixer, beside = attention(block), isinstance(block.order, Parallel)
    names = ("ln_attn", "ln_mlp") if beside else ("input_layernorm", "post_attention_layernorm")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        conversion = Grouped(mixer.heads, mixer.groups)
        yield Rule(f"{ours}.norm_in", f"{theirs}.input_layernorm")  # one for both
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.{names[0]}")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.{names[1]}")
        yield from fused_rules(ours, theirs, "self_attention", conversion)
    yield from end_rules(config, TABLE, "transformer.ln_f")


FALCON = Family(
    kind="falcon",
    shape="decoder",
    heads={"FalconForCausalLM": "lm", "FalconModel": "body"},
    prefix="transformer.",
    read=read,
    write=write,
    rules=rules,
)
