"""StarCoder2 (Lozhkov et al. 2024): plain feed-forwards, biases, grouped heads and a sliding window."""

from dataclasses import replace
from functools import partial
from typing import Any

from anyformer.config import ModelConfig, Window
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules

FIELDS = DecoderFields(
    names=replace(llama.NAMES, eps="norm_epsilon", embedding_dropout="embedding_dropout", dropout="residual_dropout"),
    vocab=49_152,
    width=3072,
    depth=30,
    heads=24,
    kv_heads=2,
    ff=12_288,
    activation="gelu_pytorch_tanh",
    length=4096,
    tied=True,
    bos=50_256,
    eos=50_256,
)
LAYER = {
    **llama.ATTENTION,
    "feedforward.norm_in": "post_attention_layernorm",
    "feedforward.inner.up": "mlp.c_fc",
    "feedforward.inner.down": "mlp.c_proj",
}


def read(fields: Fields) -> ModelConfig:
    bias, window = fields("use_bias", True), fields.maybe("sliding_window", int)
    pattern = {"pattern": Window(before=window - 1, after=0) if window else None}
    block = FIELDS.block(fields, bias=bias, mixer=pattern, feedforward={"bias": bias})
    return FIELDS.decoder(fields, block, fields.rotary(10_000.0))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    pattern = parts.mixer.pattern
    return {
        **parts.fields(),
        **parts.rotary_fields(),
        "sliding_window": pattern.before + 1 if isinstance(pattern, Window) else None,
        "use_bias": parts.mixer.bias,
    }


RULES = partial(decoder_rules, "model.layers", LAYER)
STARCODER2 = decoder_family("starcoder2", "Starcoder2", read, write, RULES)
