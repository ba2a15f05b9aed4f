"""StarCoder2 (Lozhkov et al. 2024): plain feed-forwards, biases, grouped heads and a sliding window."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Attention, Block, LayerNorm, ModelConfig, Plain, Projected, Window
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules, llama_like
from anyformer.interop.weight_rules import AnyRule, Rule

ENDS = Ends(vocab=49_152, tied=True, bos=50_256, eos=50_256)


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
    layers = [block] * fields.depth("num_hidden_layers", 30)
    tokens = {"dropout": fields("embedding_dropout", 0.0)}
    return build_decoder(fields, width, layers, fields.rotary(10_000.0), ENDS, tokens=tokens)


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    pattern = parts.mixer.pattern
    return {
        **parts.fields("gelu_pytorch_tanh"),
        **parts.rotary_fields(4096),
        "num_key_value_heads": parts.mixer.groups,
        "head_dim": parts.key,
        "norm_epsilon": parts.eps,
        "sliding_window": pattern.before + 1 if isinstance(pattern, Window) else None,
        "use_bias": parts.mixer.bias,
        "residual_dropout": parts.block.dropout,
        "embedding_dropout": parts.tokens.dropout,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield from llama.attention_rules(f"{ours}.mixer", theirs)
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.c_fc")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.c_proj")
    yield from end_rules(config)


STARCODER2 = llama_like("starcoder2", "Starcoder2", read, write, rules)
