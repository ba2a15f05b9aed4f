"""Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, one key/value head or a few."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    LM,
    Attention,
    Block,
    LayerNorm,
    ModelConfig,
    NoHead,
    Order,
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
from anyformer.interop.families.bloom import end_rules
from anyformer.interop.families.neox import fused_rules
from anyformer.interop.family import Family, attention, the
from anyformer.interop.weight_rules import AnyRule, Grouped, Rule


def read(given: Fields) -> ModelConfig:
    given.alias("n_embed", "hidden_size")
    given.must("alibi", False)
    width, heads, bias = given("hidden_size", 4544), given("num_attention_heads", 71), given("bias", False)
    new, drop = given("new_decoder_architecture", False), given("hidden_dropout", 0.0)
    groups, single = given("num_kv_heads", heads), given("multi_query", True)
    beside, norms = given("parallel_attn", True), given("num_ln_in_parallel_attn", 2 if new else 1)
    order: Order = Parallel(shared_norm=norms == 1) if new or beside else Sequential()
    norm = LayerNorm(eps=given("layer_norm_epsilon", 1e-5))
    mixer = Attention(
        heads=heads,
        kv_heads=groups if new else 1 if single else heads,
        bias=bias,
        output=Projected(bias=bias),
        dropout=given("attention_dropout", 0.0),
    )
    feedforward = Plain(
        width=given("ffn_hidden_size", 4 * width), activation=given.activation("activation", "gelu"), bias=bias
    )
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, order=order, dropout=drop)
    tied, vocab = given("tie_word_embeddings", True), given("vocab_size", 65_024)
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab),
        decoder=Stack(
            depth=given.depth("num_hidden_layers", 32),
            blocks=(block,),
            position=given.rotary(10_000.0),
            final_norm=norm,
        ),
        head=LM() if given.head == "lm" else NoHead(),
        tie="output" if tied and given.head == "lm" else "none",
        special=given.special(vocab, bos=11, eos=11),
        context=given.maybe("max_position_embeddings", int),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack = the(config.decoder, Stack, "decoder")
    tokens, block = the(config.target, Tokens, "target"), stack.blocks[0]
    mixer, feedforward = attention(block), the(block.feedforward, Plain, "decoder.blocks.0.feedforward")
    rotary = the(position_of(mixer, stack), Rotary, "decoder.position")
    norms = 1 if block.order == Parallel(shared_norm=True) else 2
    new = isinstance(block.order, Parallel) and (norms == 2 or mixer.groups not in (1, mixer.heads))
    found = {
        "vocab_size": tokens.rows,
        "hidden_size": config.width,
        "num_hidden_layers": stack.depth,
        "num_attention_heads": mixer.heads,
        "num_kv_heads": mixer.groups,
        "multi_query": mixer.groups == 1,
        "new_decoder_architecture": new,
        "parallel_attn": isinstance(block.order, Parallel),
        "ffn_hidden_size": hidden_width(feedforward, config.width),
        "activation": name_of(feedforward.activation),
        "bias": mixer.bias,
        "layer_norm_epsilon": the(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "max_position_embeddings": config.context or length_of(rotary, 2048),
        "rope_parameters": write_rotary(rotary, mixer.widths(config.width)[0]),
        "hidden_dropout": block.dropout,
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }
    return found | {"num_ln_in_parallel_attn": norms} if new else found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    block = config.decoder.blocks[0]
    mixer, beside = attention(block), isinstance(block.order, Parallel)
    names = ("ln_attn", "ln_mlp") if beside else ("input_layernorm", "post_attention_layernorm")
    yield Rule("target.table", "transformer.word_embeddings")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        way = Grouped(mixer.heads, mixer.groups)
        yield Rule(f"{ours}.norm_in", f"{theirs}.input_layernorm")  # one for both
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.{names[0]}")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.{names[1]}")
        yield from fused_rules(ours, theirs, "self_attention", way)
    yield from end_rules(config)


FALCON = Family(
    kind="falcon",
    shape="decoder",
    heads={"FalconForCausalLM": "lm", "FalconModel": "body"},
    prefix="transformer.",
    read=read,
    write=write,
    rules=rules,
)
