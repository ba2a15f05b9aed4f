"""Decoders with the layers of Megatron: GPT-NeoX, BLOOM and Falcon.

GPT-NeoX (Black et al. 2022) and Pythia have attention and feed-forward side by side, and a part of each head rotary.
BLOOM (BigScience 2022) has ALiBi, and a norm after the embeddings. Falcon (Almazrouei et al. 2023) has sublayers side
by side, and one key/value head or a few.
"""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Alibi, Gelu, ModelConfig, Order, Parallel, Sequential, position_of
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import attention, stack_of
from anyformer.interop.rotary_fields import read_rotary
from anyformer.interop.weight_rules import AnyRule, Grouped, Interleaved, Rule

FIELDS = DecoderFields(
    kind="gpt_neox", bias="attention_bias", dropout="hidden_dropout", embedding_dropout="hidden_dropout"
)


def megatron_names(mixer: str) -> dict[str, str]:
    """Return the names of a layer in Megatron, which BLOOM and Falcon also have."""
    return {
        "mixer.norm_in": "input_layernorm",
        "mixer.inner.qkv": f"{mixer}.query_key_value",
        "mixer.inner.out": f"{mixer}.dense",
        "feedforward.norm_in": "post_attention_layernorm",
        "feedforward.inner.up": "mlp.dense_h_to_4h",
        "feedforward.inner.down": "mlp.dense_4h_to_h",
    }


LAYER = megatron_names("attention")


def read(fields: Fields) -> ModelConfig:
    fields.must("is_decoder", False, True)
    fields.silent("classifier_dropout")
    order = Parallel() if fields("use_parallel_residual") else Sequential()
    block = FIELDS.block(fields, order=order)
    fields.alias("rotary_emb_base", "rope_theta")  # names in older files
    fields.alias("rotary_pct", "partial_rotary_factor")
    return FIELDS.decoder(fields, block, read_rotary(fields, 10_000.0, 0.25))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return {
        **parts.fields(),
        **parts.rotary_fields(fraction=True),
        "use_parallel_residual": parts.block.order == Parallel(),
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    turns = {"mixer.inner.qkv": Interleaved(attention(stack_of(config).blocks[0]).heads)}
    ends = {"table": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"}
    yield from decoder_rules("gpt_neox.layers", LAYER, config, conversions=turns, **ends)


NEOX = decoder_family(
    "gpt_neox",
    "GPTNeoX",
    read,
    write,
    rules,
    prefix="gpt_neox.",
    buffers=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    older=((r"^lm_head\.", "embed_out."),),
)

# -- BLOOM -------------------------------------------------------------------------------------------------------------

ENDS = {"table": "transformer.word_embeddings", "norm": "transformer.ln_f"}
BLOOM_LAYER = megatron_names("self_attention")
BLOOM_FIELDS = DecoderFields(
    kind="bloom",
    depth="n_layer",
    heads="n_head",
    ff=None,
    activation=None,
    eps="layer_norm_epsilon",
    dropout="hidden_dropout",
    context=None,
)


def _read_bloom(fields: Fields) -> ModelConfig:
    fields.alias("n_embed", "hidden_size")
    fields.must("apply_residual_connection_post_layernorm", False)
    # how it was trained and run, and older names of sizes that are there under another
    fields.silent("pretraining_tp", "slow_but_exact", "masked_softmax_fusion", "attention_softmax_in_fp32")
    fields.silent("bias_dropout_fusion", "offset_alibi", "seq_length", "unk_token_id", "skip_bias_add")
    fields.silent("skip_bias_add_qkv", "n_inner")
    block = BLOOM_FIELDS.block(fields, bias=True, feedforward={"activation": Gelu(approximate="tanh")})
    return BLOOM_FIELDS.decoder(fields, block, Alibi(), tokens={"norm": block.norm})


def _write_bloom(config: ModelConfig) -> dict[str, Any]:
    return BLOOM_FIELDS.parts(config).fields()


def _bloom_rules(config: ModelConfig) -> Iterator[AnyRule]:
    turns = Interleaved(attention(stack_of(config).blocks[0]).heads)
    yield Rule("target.norm", "transformer.word_embeddings_layernorm")
    yield from decoder_rules("transformer.h", BLOOM_LAYER, config, conversions={"mixer.inner.qkv": turns}, **ENDS)


BLOOM = decoder_family("bloom", "Bloom", _read_bloom, _write_bloom, _bloom_rules, prefix="transformer.", buffers=())

# -- Falcon ------------------------------------------------------------------------------------------------------------

FALCON_FIELDS = DecoderFields(
    kind="falcon",
    bias="bias",
    ff="ffn_hidden_size",
    activation="activation",
    network_bias="bias",
    eps="layer_norm_epsilon",
    dropout="hidden_dropout",
)


def _read_falcon(fields: Fields) -> ModelConfig:
    fields.alias("n_embed", "hidden_size")
    width, heads, new = fields("hidden_size"), fields("num_attention_heads"), fields("new_decoder_architecture")
    groups, single = fields("num_kv_heads", heads), fields("multi_query")
    beside, norms = fields("parallel_attn"), fields("num_ln_in_parallel_attn", 2 if new else 1)
    order: Order = Parallel(shared_norm=norms == 1) if new or beside else Sequential()
    mixer = {"kv_heads": groups if new else 1 if single else heads}
    network = {"width": fields("ffn_hidden_size", 4 * width)}
    block = FALCON_FIELDS.block(fields, mixer=mixer, feedforward=network, order=order)
    alibi = Alibi(factor=max(width // heads, 1) ** -0.5, rounded=True) if fields("alibi") else None
    if alibi:
        fields.silent("rope_parameters", "rope_scaling", "rope_theta")  # then not used by `transformers`
    return FALCON_FIELDS.decoder(fields, block, alibi or read_rotary(fields, 10_000.0))


def _write_falcon(config: ModelConfig) -> dict[str, Any]:
    parts = FALCON_FIELDS.parts(config)
    block, mixer = parts.block, parts.mixer
    if isinstance(position_of(mixer, parts.stack), Alibi):
        about = {"alibi": True, "max_position_embeddings": config.context or FALCON_FIELDS.length}
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
    }
    return found | {"num_ln_in_parallel_attn": norms} if new else found


def _falcon_rules(config: ModelConfig) -> Iterator[AnyRule]:
    block = stack_of(config).blocks[0]
    mixer, beside = attention(block), isinstance(block.order, Parallel)
    names = {"norm_in": "input_layernorm", **BLOOM_LAYER}  # the first: one for both sublayers
    if beside:
        names |= {"mixer.norm_in": "ln_attn", "feedforward.norm_in": "ln_mlp"}
    qkv = {"mixer.inner.qkv": Grouped(mixer.heads, mixer.groups)}
    yield from decoder_rules("transformer.h", names, config, conversions=qkv, **ENDS)


FALCON = decoder_family(
    "falcon", "Falcon", _read_falcon, _write_falcon, _falcon_rules, prefix="transformer.", buffers=()
)
