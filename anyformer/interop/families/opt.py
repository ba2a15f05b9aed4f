"""OPT (Zhang et al. 2022): GPT-3 with ReLU; OPT-350M has narrower embeddings and post-norm."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    LM,
    Attention,
    Block,
    FactorisedTable,
    FullTable,
    LayerNorm,
    Learned,
    ModelConfig,
    NoHead,
    NoNorm,
    Plain,
    Projected,
    Stack,
    Tokens,
)
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.families.decoder_frame import DecoderParts, end_rules
from anyformer.interop.family import Family, Framing, expect
from anyformer.interop.weight_rules import AnyRule, Rule

OFFSET = 2  # rows of the position table before the first


def read(fields: Fields) -> ModelConfig:
    fields.must("layer_norm_elementwise_affine", True)
    fields.silent("init_std", "layerdrop", "activation_dropout")  # the last is no field of today's
    width, drop, bias = fields("hidden_size", 768), fields("dropout", 0.1), fields("enable_bias", True)
    narrow, first = fields("word_embed_proj_dim", width), fields("do_layer_norm_before", True)
    mixer = Attention(
        heads=fields("num_attention_heads", 12),
        bias=bias,
        output=Projected(bias=bias),
        dropout=fields("attention_dropout", 0.0),
    )
    feedforward = Plain(
        width=fields("ffn_dim", 3072), activation=fields.activation("activation_function", "relu"), bias=bias
    )
    block = Block(mixer=mixer, feedforward=feedforward, placement="pre" if first else "post", dropout=drop)
    final = not fields("_remove_final_layer_norm", False) and first
    table = FactorisedTable(width=narrow, project="before_position", bias=False) if narrow != width else FullTable()
    vocab = fields("vocab_size", 50_272)
    special = fields.special(vocab, pad=1, bos=2, eos=2)
    tied = fields("tie_word_embeddings", True)
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab, table=table, pad=special.pad),
        decoder=Stack(
            depth=fields.depth("num_hidden_layers", 12),
            blocks=(block,),
            position=Learned(length=fields("max_position_embeddings", 2048), offset=OFFSET),
            final_norm=LayerNorm() if final else NoNorm(),
        ),
        head=LM() if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=special,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    return {
        "vocab_size": parts.tokens.rows,
        "word_embed_proj_dim": parts.tokens.table_width(config.width),
        "hidden_size": config.width,
        "num_hidden_layers": parts.stack.depth,
        "num_attention_heads": parts.mixer.heads,
        "ffn_dim": parts.ff,
        "max_position_embeddings": expect(parts.stack.position, Learned, "decoder.position").length,
        "do_layer_norm_before": parts.block.placement == "pre",
        "_remove_final_layer_norm": isinstance(parts.stack.final_norm, NoNorm),
        "activation_function": name_of(parts.feedforward.activation),
        "enable_bias": parts.mixer.bias,
        "dropout": parts.block.dropout,
        "attention_dropout": parts.mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    body = "model.decoder"
    yield Rule("target.project", f"{body}.project_in")
    yield Rule("decoder.embedder.tables.positions", f"{body}.embed_positions.weight")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"{body}.layers.{i}"
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.out_proj")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.fc1")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.fc2")
        for norm in ("norm_in", "norm_sum"):
            yield Rule(f"{ours}.mixer.{norm}", f"{theirs}.self_attn_layer_norm")
            yield Rule(f"{ours}.feedforward.{norm}", f"{theirs}.final_layer_norm")
    yield Rule("head.transform", f"{body}.project_out")
    yield from end_rules(config, f"{body}.embed_tokens", f"{body}.final_layer_norm")


OPT = Family(
    kind="opt",
    shape="decoder",
    heads={"OPTForCausalLM": "lm", "OPTModel": "body"},
    text=Framing(before=("bos",)),
    prefix="model.",
    older=((r"^decoder\.", "model.decoder."),),
    read=read,
    write=write,
    rules=rules,
)
