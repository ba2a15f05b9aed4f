"""MPT (MosaicML 2023): ALiBi, and no biases at all."""

from functools import partial
from typing import Any

from anyformer.config import Alibi, ConfigError, Gelu, InvSqrtKey, ModelConfig, Scale, Times
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules

FIELDS = DecoderFields(
    kind="mpt",
    width="d_model",
    depth="n_layers",
    heads="n_heads",
    ff=None,
    activation=None,
    eps="layer_norm_epsilon",
    attention_dropout=None,
    context="max_seq_len",
    norm_options={"bias": False},
)
LAYER = {
    "mixer.norm_in": "norm_1",
    "mixer.inner.qkv": "attn.Wqkv",
    "mixer.inner.out": "attn.out_proj",
    "feedforward.norm_in": "norm_2",
    "feedforward.inner.up": "ffn.up_proj",
    "feedforward.inner.down": "ffn.down_proj",
}


def read(fields: Fields) -> ModelConfig:
    fields.must("expansion_ratio", 4)
    # not used by `transformers`, which reads all files as models without biases and with ALiBi
    fields.silent("learned_pos_emb", "no_bias", "norm_type", "embedding_fraction", "init_device", "logit_scale")
    fields.silent("emb_pdrop", "resid_pdrop")
    inner = fields.table("attn_config", fields.maybe("attn_config", dict) or {})
    for name in ("attn_type", "attn_impl", "prefix_lm", "qk_ln", "attn_uses_sequence_id", "alibi", "alibi_bias_max"):
        inner.silent(name)  # neither
    inner.silent("model_type", "is_encoder_decoder", "problem_type")
    inner.must("clip_qkv", None)
    inner.must("attn_pdrop", 0)
    given = inner.maybe("softmax_scale", float)
    inner.close()
    if given is not None and given <= 0:
        raise ConfigError([inner.fault("softmax_scale", f"= {given}: must be above 0")])
    scale: Scale = InvSqrtKey() if given is None else Times(value=given)
    block = FIELDS.block(fields, mixer={"scale": scale}, feedforward={"activation": Gelu(), "bias": False})
    found = FIELDS.decoder(fields, block, Alibi())
    return found.model_copy(update={"context": found.context or FIELDS.length})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    scale = parts.mixer.scale
    return parts.fields() | {
        "max_seq_len": config.context or FIELDS.length,
        "attn_config": {"softmax_scale": scale.value if isinstance(scale, Times) else None},
    }


RULES = partial(decoder_rules, "transformer.blocks", LAYER, table="transformer.wte", norm="transformer.norm_f")
MPT = decoder_family("mpt", "Mpt", read, write, RULES, prefix="transformer.", buffers=())
