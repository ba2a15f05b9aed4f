"""BLOOM (BigScience 2022): ALiBi, and a norm after the embeddings."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Alibi, Attention, Block, Gelu, LayerNorm, ModelConfig, Plain, Projected
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.families.neox import fused_rules
from anyformer.interop.family import Family, attention
from anyformer.interop.weight_rules import AnyRule, Interleaved, Rule

TABLE = "transformer.word_embeddings"
ENDS = Ends(vocab=250_880, tied=True, bos=1, eos=2, context=None)


def read(fields: Fields) -> ModelConfig:
    fields.alias("n_embed", "hidden_size")
    fields.must("apply_residual_connection_post_layernorm", False)
    # how it was trained and run, and older names of sizes that are there under another
    fields.silent("pretraining_tp", "slow_but_exact", "masked_softmax_fusion", "attention_softmax_in_fp32")
    fields.silent("bias_dropout_fusion", "offset_alibi", "seq_length", "unk_token_id", "skip_bias_add")
    fields.silent("skip_bias_add_qkv", "n_inner")
    drop, norm = fields("hidden_dropout", 0.0), LayerNorm(eps=fields("layer_norm_epsilon", 1e-5))
    mixer = Attention(
        heads=fields("n_head", 8), bias=True, output=Projected(bias=True), dropout=fields("attention_dropout", 0.0)
    )
    block = Block(mixer=mixer, feedforward=Plain(activation=Gelu(approximate="tanh")), norm=norm, dropout=drop)
    layers = [block] * fields.depth("n_layer", 2)
    return build_decoder(fields, fields("hidden_size", 64), layers, Alibi(), ENDS, tokens={"norm": norm})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    return {
        "vocab_size": parts.tokens.rows,
        "hidden_size": config.width,
        "n_layer": parts.stack.depth,
        "n_head": parts.mixer.heads,
        "layer_norm_epsilon": parts.eps,
        "hidden_dropout": parts.block.dropout,
        "attention_dropout": parts.mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    turns = Interleaved(attention(config.decoder.blocks[0]).heads)
    yield Rule("target.norm", "transformer.word_embeddings_layernorm")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from fused_rules(ours, theirs, "self_attention", turns)
    yield from end_rules(config, TABLE, "transformer.ln_f")


BLOOM = Family(
    kind="bloom",
    shape="decoder",
    heads={"BloomForCausalLM": "lm", "BloomModel": "body"},
    prefix="transformer.",
    read=read,
    write=write,
    rules=rules,
)
