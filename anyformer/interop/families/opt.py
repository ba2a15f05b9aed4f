"""Decoders of fairseq: OPT (Zhang et al. 2022) and XGLM (Lin et al. 2021).

OPT is GPT-3 with ReLU; OPT-350M has narrower embeddings and post-norm. XGLM is a multilingual GPT-3 with the sinusoidal
positions of fairseq.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from anyformer.config import (
    FactorisedTable,
    FullTable,
    LayerNorm,
    Learned,
    ModelConfig,
    NoNorm,
    Sinusoidal,
    SqrtWidth,
    Unscaled,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.bart import LAYER
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import Framing, with_stack
from anyformer.interop.weight_rules import AnyRule, Rule

OFFSET = 2  # number of the first position, and rows of a table before it
FIELDS = DecoderFields(
    kind="opt",
    bias="enable_bias",
    ff="ffn_dim",
    activation="activation_function",
    network_bias="enable_bias",
    eps=None,
    dropout="dropout",
    context=None,
)


def read(fields: Fields) -> ModelConfig:
    fields.must("layer_norm_elementwise_affine", True)
    fields.silent("init_std", "layerdrop", "activation_dropout")  # the last is no field of today's
    width, first = fields("hidden_size"), fields("do_layer_norm_before")
    block = FIELDS.block(fields, placement="pre" if first else "post")
    narrow, final = fields("word_embed_proj_dim", width), not fields("_remove_final_layer_norm") and first
    table = FactorisedTable(width=narrow, project="before_position", bias=False) if narrow != width else FullTable()
    position = Learned(length=fields("max_position_embeddings"), offset=OFFSET)
    pad = fields.special(fields("vocab_size")).pad
    found = FIELDS.decoder(fields, block, position, tokens={"table": table, "pad": pad})
    return with_stack(found, final_norm=LayerNorm() if final else NoNorm())


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return parts.fields() | {
        "word_embed_proj_dim": parts.tokens.table_width(config.width),
        "max_position_embeddings": parts.positions,
        "do_layer_norm_before": parts.block.placement == "pre",
        "_remove_final_layer_norm": isinstance(parts.stack.final_norm, NoNorm),
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    body = "model.decoder"
    yield Rule("target.project", f"{body}.project_in")
    yield Rule("decoder.embedder.tables.positions", f"{body}.embed_positions.weight")
    yield Rule("head.transform", f"{body}.project_out")
    table, norm = f"{body}.embed_tokens", f"{body}.final_layer_norm"
    yield from decoder_rules(f"{body}.layers", LAYER, config, table=table, norm=norm)


OLDER = ((r"^decoder\.", "model.decoder."),)
OPT = decoder_family("opt", "OPT", read, write, rules, Framing(before=("bos",)), buffers=(), older=OLDER)

# -- XGLM --------------------------------------------------------------------------------------------------------------

XGLM_FIELDS = DecoderFields(
    kind="xglm",
    width="d_model",
    depth="num_layers",
    heads="attention_heads",
    ff="ffn_dim",
    activation="activation_function",
    network_dropout="activation_dropout",
    eps=None,
    embedding_dropout="dropout",
    dropout="dropout",
)


def _read_xglm(fields: Fields) -> ModelConfig:
    fields.must("add_cross_attention", False)
    fields.silent("layerdrop", "init_std")
    block = XGLM_FIELDS.block(fields, bias=True)
    position = Sinusoidal(layout="halves", closed=True, offset=OFFSET)
    scale = SqrtWidth() if fields("scale_embedding") else Unscaled()
    found = XGLM_FIELDS.decoder(fields, block, position, tokens={"scale": scale})
    if (found.special.pad or 0) >= OFFSET:
        what = f"= {found.special.pad}: must be 0 or 1: transformers has no position with this number"
        fields.refuse("pad_token_id", what)
    return found.model_copy(update={"context": found.context or XGLM_FIELDS.length})


def _write_xglm(config: ModelConfig) -> dict[str, Any]:
    parts = XGLM_FIELDS.parts(config)
    return parts.fields() | {
        "scale_embedding": parts.tokens.scale == SqrtWidth(),
        "max_position_embeddings": config.context or XGLM_FIELDS.length,
    }


XGLM = decoder_family(
    "xglm",
    "XGLM",
    _read_xglm,
    _write_xglm,
    partial(decoder_rules, "model.layers", LAYER, norm="model.layer_norm"),
    Framing(before=("eos",)),
    buffers=(r"model\.embed_positions\.weights",),
)
