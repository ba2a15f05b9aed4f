"""Command R (Cohere 2024): sublayers side by side after one norm, rotary pairs of neighbours, scaled logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    Projected,
    Rotary,
    Stack,
    Times,
    Tokens,
    Unscaled,
    factor,
    hidden_width,
    position_of,
)
from anyformer.interop.config_fields import Fields, length_of, name_of, write_rotary
from anyformer.interop.families import llama
from anyformer.interop.family import Family, Framing, attention, expect
from anyformer.interop.weight_rules import AnyRule, Reordered, Rule, pairs_to_halves


def read(fields: Fields) -> ModelConfig:
    width, heads, bias = fields("hidden_size", 8192), fields("num_attention_heads", 64), fields("attention_bias", False)
    norm, normed = LayerNorm(eps=fields("layer_norm_eps", 1e-5), bias=False), fields("use_qk_norm", False)
    mixer = Attention(
        heads=heads,
        kv_heads=fields("num_key_value_heads", heads),
        key_width=fields("head_dim", width // heads),
        bias=bias,
        output=Projected(bias=bias),
        qk_norm=norm if normed else NoNorm(),
        qk_norm_over="each_head" if normed else "head",
        dropout=fields("attention_dropout", 0.0),
    )
    feedforward = Gated(width=fields("intermediate_size", 22_528), activation=fields.activation("hidden_act", "silu"))
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, order=Parallel(shared_norm=True))
    position, scale = fields.rotary(500_000.0), fields("logit_scale", 0.0625)
    if scale <= 0:
        fields.refuse("logit_scale", f"= {scale}: must be above 0")
    tied, vocab = fields("tie_word_embeddings", True), fields("vocab_size", 256_000)
    head = LM(scale=Unscaled() if scale == 1 else Times(value=scale))
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab),
        decoder=Stack(depth=fields.depth("num_hidden_layers", 40), blocks=(block,), position=position, final_norm=norm),
        head=head if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=fields.special(vocab, pad=0, bos=5, eos=255_001),
        context=fields.maybe("max_position_embeddings", int),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.decoder, Stack, "decoder")
    tokens, block = expect(config.target, Tokens, "target"), stack.blocks[0]
    mixer, feedforward = attention(block), expect(block.feedforward, Gated, "decoder.blocks.0.feedforward")
    rotary, key = expect(position_of(mixer, stack), Rotary, "decoder.position"), mixer.widths(config.width)[0]
    return {
        "vocab_size": tokens.rows,
        "hidden_size": config.width,
        "intermediate_size": hidden_width(feedforward, config.width),
        "num_hidden_layers": stack.depth,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.groups,
        "head_dim": key,
        "hidden_act": name_of(feedforward.activation),
        "layer_norm_eps": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "logit_scale": factor(config.head.scale, config.width) if isinstance(config.head, LM) else 1.0,
        "attention_bias": mixer.bias,
        "use_qk_norm": isinstance(mixer.qk_norm, LayerNorm),
        "max_position_embeddings": config.context or length_of(rotary, 8192),
        "rope_parameters": write_rotary(rotary, key),
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


@dataclass(frozen=True, eq=False)
class _Scales:
    """γ of all heads, [h, k] in theirs and one vector in ours, in the order of our rows."""

    order: Tensor
    key_width: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].flatten()[self.order]

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole[self.order.argsort().to(whole.device)].unflatten(0, (-1, self.key_width))]


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    mixer = attention(config.decoder.blocks[0])
    key = mixer.widths(config.width)[0]
    orders = {"q": pairs_to_halves(mixer.heads, key, key), "k": pairs_to_halves(mixer.groups, key, key)}
    qkv = Reordered.parts(orders["q"], orders["k"], torch.arange(mixer.groups * key))
    yield Rule("target.table", "model.embed_tokens")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        each = [f"{theirs}.self_attn.{part}_proj" for part in "qkv"]
        yield Rule(f"{ours}.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.mixer.inner.qkv", *each, conversion=qkv)
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.o_proj")
        for name, order in orders.items():
            theirs_norm = f"{theirs}.self_attn.{name}_norm"
            yield Rule(f"{ours}.mixer.inner.{name}_norm", theirs_norm, conversion=_Scales(order, key))
        yield from llama.gated_rules(f"{ours}.feedforward.inner", f"{theirs}.mlp")
    yield from llama.end_rules(config)


COHERE = Family(
    kind="cohere",
    shape="decoder",
    heads={"CohereForCausalLM": "lm", "CohereModel": "body"},
    text=Framing(before=("bos",)),
    prefix="model.",
    buffers=llama.BUFFERS,
    read=read,
    write=write,
    rules=rules,
)
