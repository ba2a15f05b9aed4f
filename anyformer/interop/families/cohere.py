"""Command R (Cohere 2024): sublayers side by side after one norm, rotary pairs of neighbours, scaled logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyformer.config import LM, Gated, LayerNorm, ModelConfig, NoNorm, Parallel, Times, Unscaled, factor
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import Framing, attention, stack_of
from anyformer.interop.rotary_fields import read_rotary
from anyformer.interop.weight_rules import AnyRule, Reordered, Rule, pairs_to_halves

FIELDS = DecoderFields(
    kind="cohere",
    kv_heads="num_key_value_heads",
    key_width="head_dim",
    bias="attention_bias",
    network=Gated,
    norm_options={"bias": False},
)
LAYER = {"norm_in": "input_layernorm", **llama.ATTENTION, **llama.GATED}


def read(fields: Fields) -> ModelConfig:
    norm, normed = FIELDS.normed(fields), fields("use_qk_norm")
    mixer = {"qk_norm": norm if normed else NoNorm(), "qk_norm_over": "each_head" if normed else "head"}
    block, scale = FIELDS.block(fields, mixer=mixer, order=Parallel(shared_norm=True)), fields("logit_scale")
    position = read_rotary(fields, 500_000.0)
    if scale <= 0:
        fields.refuse("logit_scale", f"= {scale}: must be above 0")
    head = LM(scale=Unscaled() if scale == 1 else Times(value=scale))
    return FIELDS.decoder(fields, block, position, head=head)


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return {
        **parts.fields(),
        **parts.rotary_fields(),
        "logit_scale": factor(config.head.scale, config.width) if isinstance(config.head, LM) else 1.0,
        "use_qk_norm": isinstance(parts.mixer.qk_norm, LayerNorm),
    }


@dataclass(frozen=True, eq=False)
class _HeadScales:
    """γ of all heads, [h, k] in theirs and one vector in ours, in the order of our rows."""

    order: Tensor
    key_width: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].flatten()[self.order]

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole[self.order.argsort().to(whole.device)].unflatten(0, (-1, self.key_width))]


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    stack = stack_of(config)
    mixer = attention(stack.blocks[0])
    key = mixer.widths(config.width)[0]
    orders = {"q": pairs_to_halves(mixer.heads, key, key), "k": pairs_to_halves(mixer.groups, key, key)}
    qkv = Reordered.parts(orders["q"], orders["k"], torch.arange(mixer.groups * key))
    for i in range(stack.depth):
        for name, order in orders.items():
            ours, theirs = f"decoder.blocks.{i}.mixer.inner.{name}_norm", f"model.layers.{i}.self_attn.{name}_norm"
            yield Rule(ours, theirs, conversion=_HeadScales(order, key))
    yield from decoder_rules("model.layers", LAYER, config, conversions={"mixer.inner.qkv": qkv})


COHERE = decoder_family("cohere", "Cohere", read, write, rules, Framing(before=("bos",)))
