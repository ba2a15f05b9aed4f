"""StableLM 3B and 2 (Bellagente et al. 2024): Llama with layer norms, a part of each head rotary."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    LM,
    Attention,
    Block,
    Gated,
    LayerNorm,
    ModelConfig,
    NoHead,
    NoNorm,
    Parallel,
    Rotary,
    Sequential,
    Stack,
    Tokens,
    hidden_width,
    position_of,
)
from anyformer.interop.config_fields import Fields, length_of, name_of, write_rotary
from anyformer.interop.families import llama
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import AnyRule, Rows, Rule


def read(fields: Fields) -> ModelConfig:
    fields.must("hidden_dropout", 0.0)  # of feed-forwards alone
    width, heads = fields("hidden_size", 2560), fields("num_attention_heads", 32)
    fields.must("head_dim", width // heads)
    norm, normed = LayerNorm(eps=fields("layer_norm_eps", 1e-5)), fields("qk_layernorm", False)
    mixer = Attention(
        heads=heads,
        kv_heads=fields("num_key_value_heads", 32),
        bias=fields("use_qkv_bias", False),
        qk_norm=LayerNorm(eps=norm.eps, bias=False) if normed else NoNorm(),
        qk_norm_over="each_head" if normed else "head",
        dropout=fields("attention_dropout", 0.0),
    )
    feedforward = Gated(width=fields("intermediate_size", 6912), activation=fields.activation("hidden_act", "silu"))
    order = Parallel(shared_norm=True) if fields("use_parallel_residual", False) else Sequential()
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, order=order)
    position, depth = fields.rotary(10_000.0, 0.25), fields.depth("num_hidden_layers", 32)
    tied, vocab = fields("tie_word_embeddings", False), fields("vocab_size", 50_304)
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab),
        decoder=Stack(depth=depth, blocks=(block,), position=position, final_norm=norm),
        head=LM() if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=fields.special(vocab, bos=0, eos=0),
        context=fields.maybe("max_position_embeddings", int),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    tokens, block = expect(config.target, Tokens, "target"), stack.blocks[0]
    mixer, feedforward = attention(block), expect(block.feedforward, Gated, "decoder.blocks.0.feedforward")
    rotary = expect(position_of(mixer, stack), Rotary, "decoder.position")
    parameters = write_rotary(rotary, mixer.widths(config.width)[0])
    return {
        "vocab_size": tokens.rows,
        "hidden_size": config.width,
        "intermediate_size": hidden_width(feedforward, config.width),
        "num_hidden_layers": stack.depth,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.groups,
        "hidden_act": name_of(feedforward.activation),
        "layer_norm_eps": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "use_qkv_bias": mixer.bias,
        "qk_layernorm": isinstance(mixer.qk_norm, LayerNorm),
        "use_parallel_residual": isinstance(block.order, Parallel),
        "max_position_embeddings": config.context or length_of(rotary, 4096),
        "rope_parameters": parameters | {"partial_rotary_factor": rotary.fraction},
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    mixer = attention(config.decoder.blocks[0])
    key = mixer.widths(config.width)[0]
    yield Rule("target.table", "model.embed_tokens")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield Rule(f"{ours}.norm_in", f"{theirs}.input_layernorm")  # one for both
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.o_proj")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from llama.gated_rules(f"{ours}.feedforward.inner", f"{theirs}.mlp")
        for name, heads in (("q", mixer.heads), ("k", mixer.groups)):
            each = [f"{theirs}.self_attn.{name}_layernorm.norms.{n}.weight" for n in range(heads)]
            yield Rule(f"{ours}.mixer.inner.{name}_norm.weight", *each, conversion=Rows((key,) * heads))
    yield from llama.end_rules(config)


STABLELM = Family(
    kind="stablelm",
    shape="decoder",
    heads={"StableLmForCausalLM": "lm", "StableLmModel": "body"},
    prefix="model.",
    buffers=llama.BUFFERS,
    read=read,
    write=write,
    rules=rules,
)
