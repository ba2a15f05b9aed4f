"""GPT-NeoX (Black et al. 2022) and Pythia: attention and feed-forward side by side, a part of each head rotary."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    LM,
    Attention,
    Block,
    LayerNorm,
    ModelConfig,
    NoHead,
    Parallel,
    Plain,
    Projected,
    Rotary,
    Sequential,
    Stack,
    Tokens,
    hidden_width,
    position_of,
)
from anyformer.interop.config_fields import Fields, length_of, name_of, write_rotary
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Conversion, Interleaved, Rule


def read(fields: Fields) -> ModelConfig:
    fields.must("is_decoder", False, True)
    fields.silent("classifier_dropout")
    drop, bias = fields("hidden_dropout", 0.0), fields("attention_bias", True)
    norm = LayerNorm(eps=fields("layer_norm_eps", 1e-5))
    mixer = Attention(
        heads=fields("num_attention_heads", 64),
        bias=bias,
        output=Projected(bias=bias),
        dropout=fields("attention_dropout", 0.0),
    )
    block = Block(
        mixer=mixer,
        feedforward=Plain(
            width=fields("intermediate_size", 24_576), activation=fields.activation("hidden_act", "gelu")
        ),
        norm=norm,
        order=Parallel() if fields("use_parallel_residual", True) else Sequential(),
        dropout=drop,
    )
    fields.alias("rotary_emb_base", "rope_theta")  # names in older files
    fields.alias("rotary_pct", "partial_rotary_factor")
    position = fields.rotary(10_000.0, 0.25)
    tied, vocab = fields("tie_word_embeddings", False), fields("vocab_size", 50_432)
    return ModelConfig(
        width=fields("hidden_size", 6144),
        target=Tokens(vocab=vocab, dropout=drop),
        decoder=Stack(depth=fields.depth("num_hidden_layers", 44), blocks=(block,), position=position, final_norm=norm),
        head=LM() if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=fields.special(vocab, bos=0, eos=2),
        context=fields.maybe("max_position_embeddings", int),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    tokens, block = expect(config.target, Tokens, "target"), stack.blocks[0]
    mixer, feedforward = attention(block), expect(block.feedforward, Plain, "decoder.blocks.0.feedforward")
    rotary = expect(position_of(mixer, stack), Rotary, "decoder.position")
    parameters = write_rotary(rotary, mixer.widths(config.width)[0])
    return {
        "vocab_size": tokens.rows,
        "hidden_size": config.width,
        "num_hidden_layers": stack.depth,
        "num_attention_heads": mixer.heads,
        "intermediate_size": hidden_width(feedforward, config.width),
        "hidden_act": name_of(feedforward.activation),
        "layer_norm_eps": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "use_parallel_residual": block.order == Parallel(),
        "attention_bias": mixer.bias,
        "max_position_embeddings": config.context or length_of(rotary, 2048),
        "rope_parameters": parameters | {"partial_rotary_factor": rotary.fraction},
        "hidden_dropout": block.dropout,
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    turns = Interleaved(attention(config.decoder.blocks[0]).heads)
    yield Rule("target.table", "gpt_neox.embed_in")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"gpt_neox.layers.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from fused_rules(ours, theirs, "attention", turns)
    yield Rule("decoder.final_norm", "gpt_neox.final_layer_norm")
    yield Rule("head.table", "embed_out.weight")
    if config.tie == "output":
        yield Alias("embed_out.weight", of="gpt_neox.embed_in.weight")


def fused_rules(ours: str, theirs: str, mixer: str, conversion: Conversion) -> Iterator[AnyRule]:
    """Yield the linear layers of a block by their Megatron names, which BLOOM and Falcon also use."""
    yield Rule(f"{ours}.mixer.inner.qkv", f"{theirs}.{mixer}.query_key_value", conversion=conversion)
    yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.{mixer}.dense")
    yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.dense_h_to_4h")
    yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.dense_4h_to_h")


NEOX = Family(
    kind="gpt_neox",
    shape="decoder",
    heads={"GPTNeoXForCausalLM": "lm", "GPTNeoXModel": "body"},
    prefix="gpt_neox.",
    buffers=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    older=((r"^lm_head\.", "embed_out."),),
    read=read,
    write=write,
    rules=rules,
)
