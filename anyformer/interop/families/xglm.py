"""XGLM (Lin et al. 2021): a multilingual GPT-3 with the sinusoidal positions of fairseq."""

from functools import partial
from typing import Any

from anyformer.config import ModelConfig, Sinusoidal, SqrtWidth, Unscaled
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import FieldNames
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import Framing
from anyformer.interop.weight_rules import split_names

NAMES = FieldNames(
    width="d_model",
    depth="num_layers",
    heads="attention_heads",
    ff="ffn_dim",
    activation="activation_function",
    eps=None,
    embedding_dropout="dropout",
    dropout="dropout",
)
FIELDS = DecoderFields(
    names=NAMES,
    vocab=256_008,
    width=1024,
    depth=24,
    heads=16,
    ff=4096,
    activation="gelu",
    dropout=0.1,
    tied=True,
    pad=1,
    bos=0,
    eos=2,
)
OFFSET = 2  # number of the first position
LAYER = {
    "mixer.norm_in": "self_attn_layer_norm",
    "mixer.inner.qkv": split_names("self_attn.{}_proj"),
    "mixer.inner.out": "self_attn.out_proj",
    "feedforward.norm_in": "final_layer_norm",
    "feedforward.inner.up": "fc1",
    "feedforward.inner.down": "fc2",
}


def read(fields: Fields) -> ModelConfig:
    fields.must("add_cross_attention", False)
    fields.silent("layerdrop", "init_std")
    block = FIELDS.block(fields, bias=True, feedforward={"dropout": fields("activation_dropout", 0.0)})
    position = Sinusoidal(layout="halves", closed=True, offset=OFFSET)
    scale = SqrtWidth() if fields("scale_embedding", True) else Unscaled()
    found = FIELDS.decoder(fields, block, position, tokens={"scale": scale})
    if (found.special.pad or 0) >= OFFSET:
        what = f"= {found.special.pad}: must be 0 or 1: transformers has no position with this number"
        fields.refuse("pad_token_id", what)
    return found.model_copy(update={"context": found.context or FIELDS.length})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return parts.fields() | {
        "scale_embedding": parts.tokens.scale == SqrtWidth(),
        "max_position_embeddings": config.context or FIELDS.length,
        "activation_dropout": parts.feedforward.dropout,
    }


XGLM = decoder_family(
    "xglm",
    "XGLM",
    read,
    write,
    partial(decoder_rules, "model.layers", LAYER, norm="model.layer_norm"),
    Framing(before=("eos",)),
    buffers=(r"model\.embed_positions\.weights",),
)
