"""Phi-1 and Phi-2 (Gunasekar et al. 2023): sublayers side by side after one norm, a part of each head rotary."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import LM, Attention, Block, LayerNorm, ModelConfig, NoNorm, Parallel, Plain, Projected
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules, llama_like
from anyformer.interop.weight_rules import AnyRule, Rule

ENDS = Ends(vocab=51_200, tied=False, bos=1, eos=2)


def read(fields: Fields) -> ModelConfig:
    width, heads = fields("hidden_size", 2048), fields("num_attention_heads", 32)
    fields.must("head_dim", width // heads)
    norm = LayerNorm(eps=fields("layer_norm_eps", 1e-5))
    mixer = Attention(
        heads=heads,
        kv_heads=fields("num_key_value_heads", heads),
        bias=True,
        output=Projected(bias=True),
        qk_norm=norm if fields("qk_layernorm", False) else NoNorm(),
        dropout=fields("attention_dropout", 0.0),
    )
    feedforward = Plain(width=fields("intermediate_size", 8192), activation=fields.activation("hidden_act", "gelu_new"))
    order, drop = Parallel(shared_norm=True), fields("resid_pdrop", 0.0)
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, order=order, dropout=drop)
    layers = [block] * fields.depth("num_hidden_layers", 24)
    tokens = {"dropout": fields("embd_pdrop", 0.0)}
    position = fields.rotary(10_000.0, 0.5)
    return build_decoder(fields, width, layers, position, ENDS, tokens=tokens, head=LM(bias=True))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    return {
        **parts.fields("gelu_new"),
        **parts.rotary_fields(2048, fraction=True),
        "num_key_value_heads": parts.mixer.groups,
        "layer_norm_eps": parts.eps,
        "qk_layernorm": isinstance(parts.mixer.qk_norm, LayerNorm),
        "resid_pdrop": parts.block.dropout,
        "embd_pdrop": parts.tokens.dropout,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield Rule(f"{ours}.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.dense")
        yield Rule(f"{ours}.mixer.inner.q_norm", f"{theirs}.self_attn.q_layernorm")
        yield Rule(f"{ours}.mixer.inner.k_norm", f"{theirs}.self_attn.k_layernorm")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.fc1")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.fc2")
    yield from end_rules(config, norm="model.final_layernorm")


PHI = llama_like("phi", "Phi", read, write, rules)
