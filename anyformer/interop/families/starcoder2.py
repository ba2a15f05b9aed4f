"""StarCoder2 (Lozhkov et al. 2024): plain feed-forwards, biases, grouped heads and a sliding window."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    LM,
    Attention,
    Block,
    LayerNorm,
    ModelConfig,
    NoHead,
    Plain,
    Projected,
    Rotary,
    Stack,
    Tokens,
    Window,
    hidden_width,
    position_of,
)
from anyformer.interop.config_fields import Fields, length_of, name_of, write_rotary
from anyformer.interop.families import llama
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import AnyRule, Rule


def read(fields: Fields) -> ModelConfig:
    width, heads, bias = fields("hidden_size", 3072), fields("num_attention_heads", 24), fields("use_bias", True)
    norm, window = LayerNorm(eps=fields("norm_epsilon", 1e-5)), fields.maybe("sliding_window", int)
    mixer = Attention(
        heads=heads,
        kv_heads=fields("num_key_value_heads", 2),
        key_width=fields("head_dim", width // heads),
        bias=bias,
        output=Projected(bias=bias),
        pattern=Window(before=window - 1, after=0) if window else None,
        dropout=fields("attention_dropout", 0.0),
    )
    act = fields.activation("hidden_act", "gelu_pytorch_tanh")
    feedforward = Plain(width=fields("intermediate_size", 12_288), activation=act, bias=bias)
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, dropout=fields("residual_dropout", 0.0))
    position = fields.rotary(10_000.0)
    tied, vocab = fields("tie_word_embeddings", True), fields("vocab_size", 49_152)
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab, dropout=fields("embedding_dropout", 0.0)),
        decoder=Stack(depth=fields.depth("num_hidden_layers", 30), blocks=(block,), position=position, final_norm=norm),
        head=LM() if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=fields.special(vocab, bos=50_256, eos=50_256),
        context=fields.maybe("max_position_embeddings", int),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    tokens, block = expect(config.target, Tokens, "target"), stack.blocks[0]
    mixer, feedforward = attention(block), expect(block.feedforward, Plain, "decoder.blocks.0.feedforward")
    rotary = expect(position_of(mixer, stack), Rotary, "decoder.position")
    key = mixer.widths(config.width)[0]
    return {
        "vocab_size": tokens.rows,
        "hidden_size": config.width,
        "intermediate_size": hidden_width(feedforward, config.width),
        "num_hidden_layers": stack.depth,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.groups,
        "head_dim": key,
        "hidden_act": name_of(feedforward.activation, first="gelu_pytorch_tanh"),
        "norm_epsilon": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "sliding_window": mixer.pattern.before + 1 if isinstance(mixer.pattern, Window) else None,
        "use_bias": mixer.bias,
        "max_position_embeddings": config.context or length_of(rotary, 4096),
        "rope_parameters": write_rotary(rotary, key),
        "residual_dropout": block.dropout,
        "embedding_dropout": tokens.dropout,
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    yield Rule("target.table", "model.embed_tokens")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield from llama.attention_rules(f"{ours}.mixer", theirs)
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.c_fc")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.c_proj")
    yield from llama.end_rules(config)


STARCODER2 = Family(
    kind="starcoder2",
    shape="decoder",
    heads={"Starcoder2ForCausalLM": "lm", "Starcoder2Model": "body"},
    prefix="model.",
    buffers=llama.BUFFERS,
    read=read,
    write=write,
    rules=rules,
)
