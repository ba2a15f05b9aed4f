"""StableLM 3B and 2 (Bellagente et al. 2024): Llama with layer norms, a part of each head rotary."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Gated, LayerNorm, ModelConfig, NoNorm, Parallel, Projected, Sequential
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import attention, stack_of
from anyformer.interop.rotary_fields import read_rotary
from anyformer.interop.weight_rules import AnyRule, Rule, StackedRows

FIELDS = DecoderFields(kind="stablelm", kv_heads="num_key_value_heads", bias="use_qkv_bias", network=Gated)
LAYER = {
    "norm_in": "input_layernorm",  # one for both sublayers
    **llama.ATTENTION,
    "feedforward.norm_in": "post_attention_layernorm",
    **llama.GATED,
}


def read(fields: Fields) -> ModelConfig:
    fields.must("hidden_dropout", 0.0)  # of feed-forwards alone
    fields.must("head_dim", fields("hidden_size") // fields("num_attention_heads"))
    normed = fields("qk_layernorm")
    mixer = {
        "output": Projected(),
        "qk_norm": LayerNorm(eps=FIELDS.normed(fields).eps, bias=False) if normed else NoNorm(),
        "qk_norm_over": "each_head" if normed else "head",
    }
    order = Parallel(shared_norm=True) if fields("use_parallel_residual") else Sequential()
    block = FIELDS.block(fields, mixer=mixer, order=order)
    return FIELDS.decoder(fields, block, read_rotary(fields, 10_000.0, 0.25))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return {
        **parts.fields(),
        **parts.rotary_fields(fraction=True),
        "qk_layernorm": isinstance(parts.mixer.qk_norm, LayerNorm),
        "use_parallel_residual": isinstance(parts.block.order, Parallel),
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    stack = stack_of(config)
    mixer = attention(stack.blocks[0])
    key = mixer.widths(config.width)[0]
    for i in range(stack.depth):
        for name, heads in (("q", mixer.heads), ("k", mixer.groups)):
            each = [f"model.layers.{i}.self_attn.{name}_layernorm.norms.{n}.weight" for n in range(heads)]
            yield Rule(
                f"decoder.blocks.{i}.mixer.inner.{name}_norm.weight", *each, conversion=StackedRows((key,) * heads)
            )
    yield from decoder_rules("model.layers", LAYER, config)


STABLELM = decoder_family("stablelm", "StableLm", read, write, rules)
