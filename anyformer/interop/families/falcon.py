"""Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, one key/value head or a few."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Alibi, ModelConfig, Order, Parallel, Sequential, position_of
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bloom
from anyformer.interop.families.block_fields import FieldNames
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import attention
from anyformer.interop.weight_rules import AnyRule, Grouped

NAMES = FieldNames(ff="ffn_hidden_size", activation="activation", eps="layer_norm_epsilon", dropout="hidden_dropout")
FIELDS = DecoderFields(
    names=NAMES, vocab=65_024, width=4544, depth=32, heads=71, activation="gelu", tied=True, bos=11, eos=11
)


def read(fields: Fields) -> ModelConfig:
    fields.alias("n_embed", "hidden_size")
    width, heads, bias = fields("hidden_size", 4544), fields("num_attention_heads", 71), fields("bias", False)
    new = fields("new_decoder_architecture", False)
    groups, single = fields("num_kv_heads", heads), fields("multi_query", True)
    beside, norms = fields("parallel_attn", True), fields("num_ln_in_parallel_attn", 2 if new else 1)
    order: Order = Parallel(shared_norm=norms == 1) if new or beside else Sequential()
    mixer = {"kv_heads": groups if new else 1 if single else heads}
    network = {"width": fields("ffn_hidden_size", 4 * width), "bias": bias}
    block = FIELDS.block(fields, bias=bias, mixer=mixer, feedforward=network, order=order)
    alibi = Alibi(factor=max(width // heads, 1) ** -0.5, rounded=True) if fields("alibi", False) else None
    if alibi:
        fields.silent("rope_parameters", "rope_scaling", "rope_theta")  # then not used by `transformers`
    return FIELDS.decoder(fields, block, alibi or fields.rotary(10_000.0))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    block, mixer = parts.block, parts.mixer
    if isinstance(position_of(mixer, parts.stack), Alibi):
        about = {"alibi": True, "max_position_embeddings": config.context or FIELDS.length}
    else:
        about = parts.rotary_fields()
    norms = 1 if block.order == Parallel(shared_norm=True) else 2
    new = isinstance(block.order, Parallel) and (norms == 2 or mixer.groups not in (1, mixer.heads))
    found = {
        **parts.fields(),
        **about,
        "num_kv_heads": mixer.groups,
        "multi_query": mixer.groups == 1,
        "new_decoder_architecture": new,
        "parallel_attn": isinstance(block.order, Parallel),
        "bias": mixer.bias,
    }
    return found | {"num_ln_in_parallel_attn": norms} if new else found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    block = config.decoder.blocks[0]
    mixer, beside = attention(block), isinstance(block.order, Parallel)
    names = {"norm_in": "input_layernorm", **bloom.LAYER}  # the first: one for both sublayers
    if beside:
        names |= {"mixer.norm_in": "ln_attn", "feedforward.norm_in": "ln_mlp"}
    qkv = {"mixer.inner.qkv": Grouped(mixer.heads, mixer.groups)}
    yield from decoder_rules("transformer.h", names, config, conversions=qkv, **bloom.ENDS)


FALCON = decoder_family("falcon", "Falcon", read, write, rules, prefix="transformer.", buffers=())
