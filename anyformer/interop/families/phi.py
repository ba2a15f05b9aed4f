"""Phi-1 and Phi-2 (Gunasekar et al. 2023): sublayers side by side after one norm, a part of each head rotary."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    LM,
    Attention,
    Block,
    LayerNorm,
    ModelConfig,
    NoHead,
    NoNorm,
    Parallel,
    Plain,
    Projected,
    Rotary,
    Stack,
    Tokens,
    hidden_width,
    position_of,
)
from anyformer.interop.config_fields import Fields, length_of, name_of, write_rotary
from anyformer.interop.families import llama
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Rule


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
    position = fields.rotary(10_000.0, 0.5)
    tied, vocab = fields("tie_word_embeddings", False), fields("vocab_size", 51_200)
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab, dropout=fields("embd_pdrop", 0.0)),
        decoder=Stack(depth=fields.depth("num_hidden_layers", 24), blocks=(block,), position=position, final_norm=norm),
        head=LM(bias=True) if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=fields.special(vocab, bos=1, eos=2),
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
        "intermediate_size": hidden_width(feedforward, config.width),
        "num_hidden_layers": stack.depth,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.groups,
        "hidden_act": name_of(feedforward.activation, first="gelu_new"),
        "layer_norm_eps": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "qk_layernorm": isinstance(mixer.qk_norm, LayerNorm),
        "max_position_embeddings": config.context or length_of(rotary, 2048),
        "rope_parameters": parameters | {"partial_rotary_factor": rotary.fraction},
        "resid_pdrop": block.dropout,
        "embd_pdrop": tokens.dropout,
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    yield Rule("target.table", "model.embed_tokens")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield Rule(f"{ours}.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.dense")
        yield Rule(f"{ours}.mixer.inner.q_norm", f"{theirs}.self_attn.q_layernorm")
        yield Rule(f"{ours}.mixer.inner.k_norm", f"{theirs}.self_attn.k_layernorm")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.fc1")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.fc2")
    yield Rule("decoder.final_norm", "model.final_layernorm")
    yield Rule("head.table", "lm_head.weight")
    yield Rule("head.bias", "lm_head.bias")
    if config.tie == "output":
        yield Alias("lm_head.weight", of="model.embed_tokens.weight")


PHI = Family(
    kind="phi",
    shape="decoder",
    heads={"PhiForCausalLM": "lm", "PhiModel": "body"},
    prefix="model.",
    buffers=llama.BUFFERS,
    read=read,
    write=write,
    rules=rules,
)
