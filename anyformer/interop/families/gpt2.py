"""GPT-2 (Radford et al. 2019)."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    LM,
    Attention,
    Block,
    InvSqrtKey,
    LayerNorm,
    Learned,
    ModelConfig,
    NoHead,
    Normal,
    Plain,
    Projected,
    Stack,
    Tokens,
    Unscaled,
    hidden_width,
)
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Rule, Transposed


def read(fields: Fields) -> ModelConfig:
    fields.must("add_cross_attention", False)
    fields.must("scale_attn_by_inverse_layer_idx", False)
    fields.silent("reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation")
    fields.silent("summary_proj_to_labels", "summary_first_dropout")
    norm = LayerNorm(eps=fields("layer_norm_epsilon", 1e-5))
    mixer = Attention(
        heads=fields("n_head", 12),
        bias=True,
        output=Projected(bias=True),
        scale=InvSqrtKey() if fields("scale_attn_weights", True) else Unscaled(),
        dropout=fields("attn_pdrop", 0.1),
    )
    feedforward = Plain(
        width=fields.maybe("n_inner", int), activation=fields.activation("activation_function", "gelu_new")
    )
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, dropout=fields("resid_pdrop", 0.1))
    position = Learned(length=fields("n_positions", 1024))
    tied, vocab = fields("tie_word_embeddings", True), fields("vocab_size", 50_257)
    return ModelConfig(
        width=fields("n_embd", 768),
        target=Tokens(vocab=vocab, dropout=fields("embd_pdrop", 0.1)),
        decoder=Stack(depth=fields.depth("n_layer", 12), blocks=(block,), position=position, final_norm=norm),
        head=LM() if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        init=Normal(residual=True),
        special=fields.special(vocab, bos=50_256, eos=50_256),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    tokens, block = expect(config.target, Tokens, "target"), stack.blocks[0]
    mixer, feedforward = attention(block), expect(block.feedforward, Plain, "decoder.blocks.0.feedforward")
    return {
        "vocab_size": tokens.rows,
        "n_positions": expect(stack.position, Learned, "decoder.position").length,
        "n_embd": config.width,
        "n_layer": stack.depth,
        "n_head": mixer.heads,
        "n_inner": hidden_width(feedforward, config.width),
        "activation_function": name_of(feedforward.activation, first="gelu_new"),
        "layer_norm_epsilon": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "scale_attn_weights": mixer.scale == InvSqrtKey(),
        "resid_pdrop": block.dropout,
        "embd_pdrop": tokens.dropout,
        "attn_pdrop": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    yield Rule("target.table", "transformer.wte")
    yield Rule("decoder.embedder.tables.positions", "transformer.wpe.weight")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.ln_1")
        yield Rule(f"{ours}.mixer.inner.qkv", f"{theirs}.attn.c_attn", conversion=Transposed())
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attn.c_proj", conversion=Transposed())
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.ln_2")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.c_fc", conversion=Transposed())
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.c_proj", conversion=Transposed())
    yield Rule("decoder.final_norm", "transformer.ln_f")
    yield Rule("head.table", "lm_head.weight")
    if config.tie == "output":
        yield Alias("lm_head.weight", of="transformer.wte.weight")


GPT2 = Family(
    kind="gpt2",
    shape="decoder",
    heads={"GPT2LMHeadModel": "lm", "GPT2Model": "body"},
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    read=read,
    write=write,
    rules=rules,
)
