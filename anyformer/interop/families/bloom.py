"""BLOOM (BigScience 2022): ALiBi, and a norm after the embeddings."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    Gelu,
    LayerNorm,
    ModelConfig,
    NoHead,
    Plain,
    Projected,
    Stack,
    Tokens,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.neox import fused_rules
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Interleaved, Rule


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
    tied, vocab = fields("tie_word_embeddings", True), fields("vocab_size", 250_880)
    return ModelConfig(
        width=fields("hidden_size", 64),
        target=Tokens(vocab=vocab, norm=norm),
        decoder=Stack(depth=fields.depth("n_layer", 2), blocks=(block,), position=Alibi(), final_norm=norm),
        head=LM() if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=fields.special(vocab, bos=1, eos=2),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    tokens, block = expect(config.target, Tokens, "target"), stack.blocks[0]
    return {
        "vocab_size": tokens.rows,
        "hidden_size": config.width,
        "n_layer": stack.depth,
        "n_head": attention(block).heads,
        "layer_norm_epsilon": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "hidden_dropout": block.dropout,
        "attention_dropout": attention(block).dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    turns = Interleaved(attention(config.decoder.blocks[0]).heads)
    yield Rule("target.table", "transformer.word_embeddings")
    yield Rule("target.norm", "transformer.word_embeddings_layernorm")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from fused_rules(ours, theirs, "self_attention", turns)
    yield from end_rules(config)


def end_rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield Rule("decoder.final_norm", "transformer.ln_f")
    yield Rule("head.table", "lm_head.weight")
    if config.tie == "output":
        yield Alias("lm_head.weight", of="transformer.word_embeddings.weight")


BLOOM = Family(
    kind="bloom",
    shape="decoder",
    heads={"BloomForCausalLM": "lm", "BloomModel": "body"},
    prefix="transformer.",
    read=read,
    write=write,
    rules=rules,
)
