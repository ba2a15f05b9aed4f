"""StarCoder2 (Lozhkov et al. 2024): plain feed-forwards, biases, grouped heads and a sliding window."""

from functools import partial
from typing import Any

from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.block_fields import LayerKinds, sliding
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.rotary_fields import read_rotary

FIELDS = DecoderFields(
    kind="starcoder2",
    kv_heads="num_key_value_heads",
    key_width="head_dim",
    bias="use_bias",
    network_bias="use_bias",
    eps="norm_epsilon",
    embedding_dropout="embedding_dropout",
    dropout="residual_dropout",
)
LAYER = {
    **llama.ATTENTION,
    "feedforward.norm_in": "post_attention_layernorm",
    "feedforward.inner.up": "mlp.c_fc",
    "feedforward.inner.down": "mlp.c_proj",
}


def read(fields: Fields) -> ModelConfig:
    block, window = FIELDS.block(fields), fields.maybe("sliding_window", int)
    return FIELDS.decoder(fields, sliding(block, window) if window else block, read_rotary(fields, 10_000.0))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return {**parts.fields(), **parts.rotary_fields(), "sliding_window": LayerKinds.of(parts.stack.unrolled()).size}


RULES = partial(decoder_rules, "model.layers", LAYER)
STARCODER2 = decoder_family("starcoder2", "Starcoder2", read, write, RULES)
