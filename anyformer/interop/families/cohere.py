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
    NoNorm,
    Parallel,
    Projected,
    Times,
    Unscaled,
    factor,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules, llama_like
from anyformer.interop.family import Framing, attention
from anyformer.interop.weight_rules import AnyRule, Reordered, Rule, pairs_to_halves

ENDS = Ends(vocab=256_000, tied=True, pad=0, bos=5, eos=255_001)


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
    layers, head = [block] * fields.depth("num_hidden_layers", 40), Unscaled() if scale == 1 else Times(value=scale)
    return build_decoder(fields, width, layers, position, ENDS, head=LM(scale=head))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Gated)
    return {
        **parts.fields(),
        **parts.rotary_fields(8192),
        "num_key_value_heads": parts.mixer.groups,
        "head_dim": parts.key,
        "layer_norm_eps": parts.eps,
        "logit_scale": factor(config.head.scale, config.width) if isinstance(config.head, LM) else 1.0,
        "attention_bias": parts.mixer.bias,
        "use_qk_norm": isinstance(parts.mixer.qk_norm, LayerNorm),
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
    yield from end_rules(config)


COHERE = llama_like("cohere", "Cohere", read, write, rules, Framing(before=("bos",)))
