"""XGLM (Lin et al. 2021): a multilingual GPT-3 with the sinusoidal positions of fairseq."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    Attention,
    Block,
    LayerNorm,
    ModelConfig,
    Plain,
    Projected,
    Sinusoidal,
    SqrtWidth,
    Unscaled,
)
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.family import Family, Framing
from anyformer.interop.weight_rules import AnyRule, Rule

ENDS = Ends(vocab=256_008, tied=True, pad=1, bos=0, eos=2)
LENGTH = 2048  # longest text by default
OFFSET = 2  # number of the first position


def read(fields: Fields) -> ModelConfig:
    fields.must("add_cross_attention", False)
    fields.silent("layerdrop", "init_std")
    drop, norm = fields("dropout", 0.1), LayerNorm()
    mixer = Attention(
        heads=fields("attention_heads", 16),
        bias=True,
        output=Projected(bias=True),
        dropout=fields("attention_dropout", 0.1),
    )
    feedforward = Plain(
        width=fields("ffn_dim", 4096),
        activation=fields.activation("activation_function", "gelu"),
        dropout=fields("activation_dropout", 0.0),
    )
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, dropout=drop)
    tokens = {"scale": SqrtWidth() if fields("scale_embedding", True) else Unscaled(), "dropout": drop}
    position = Sinusoidal(layout="halves", closed=True, offset=OFFSET)
    layers, width = [block] * fields.depth("num_layers", 24), fields("d_model", 1024)
    found = build_decoder(fields, width, layers, position, ENDS, tokens=tokens)
    if (found.special.pad or 0) >= OFFSET:
        what = f"= {found.special.pad}: must be 0 or 1: transformers has no position with this number"
        fields.refuse("pad_token_id", what)
    return found.model_copy(update={"context": found.context or LENGTH})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    return {
        "vocab_size": parts.tokens.rows,
        "d_model": config.width,
        "num_layers": parts.stack.depth,
        "attention_heads": parts.mixer.heads,
        "ffn_dim": parts.ff,
        "activation_function": name_of(parts.feedforward.activation),
        "scale_embedding": parts.tokens.scale == SqrtWidth(),
        "max_position_embeddings": config.context or LENGTH,
        "dropout": parts.block.dropout,
        "attention_dropout": parts.mixer.dropout,
        "activation_dropout": parts.feedforward.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.self_attn_layer_norm")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.out_proj")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.final_layer_norm")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.fc1")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.fc2")
    yield from end_rules(config, norm="model.layer_norm")


XGLM = Family(
    kind="xglm",
    shape="decoder",
    heads={"XGLMForCausalLM": "lm", "XGLMModel": "body"},
    text=Framing(before=("eos",)),
    prefix="model.",
    buffers=(r"model\.embed_positions\.weights",),
    read=read,
    write=write,
    rules=rules,
)
