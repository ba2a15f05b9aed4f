"""OPT (Zhang et al. 2022): GPT-3 with ReLU; OPT-350M has narrower embeddings and post-norm."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import FactorisedTable, FullTable, LayerNorm, Learned, ModelConfig, NoNorm
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import FieldNames
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import Framing
from anyformer.interop.weight_rules import AnyRule, Rule, split_names

OFFSET = 2  # rows of the position table before the first
NAMES = FieldNames(ff="ffn_dim", activation="activation_function", eps=None, dropout="dropout", context=None)
FIELDS = DecoderFields(
    names=NAMES,
    vocab=50_272,
    width=768,
    depth=12,
    heads=12,
    ff=3072,
    activation="relu",
    dropout=0.1,
    attention_dropout=0.0,
    tied=True,
    pad=1,
    bos=2,
    eos=2,
)
LAYER = {
    "mixer.inner.qkv": split_names("self_attn.{}_proj"),
    "mixer.inner.out": "self_attn.out_proj",
    "feedforward.inner.up": "fc1",
    "feedforward.inner.down": "fc2",
}
for norm in ("norm_in", "norm_sum"):
    LAYER |= {f"mixer.{norm}": "self_attn_layer_norm", f"feedforward.{norm}": "final_layer_norm"}


def read(fields: Fields) -> ModelConfig:
    fields.must("layer_norm_elementwise_affine", True)
    fields.silent("init_std", "layerdrop", "activation_dropout")  # the last is no field of today's
    width, bias, first = fields("hidden_size", 768), fields("enable_bias", True), fields("do_layer_norm_before", True)
    block = FIELDS.block(fields, bias=bias, feedforward={"bias": bias}, placement="pre" if first else "post")
    narrow, final = fields("word_embed_proj_dim", width), not fields("_remove_final_layer_norm", False) and first
    table = FactorisedTable(width=narrow, project="before_position", bias=False) if narrow != width else FullTable()
    position = Learned(length=fields("max_position_embeddings", 2048), offset=OFFSET)
    found = FIELDS.decoder(fields, block, position, tokens={"table": table})
    assert found.decoder
    assert found.target
    changes = {
        "target": found.target.model_copy(update={"pad": found.special.pad}),
        "decoder": found.decoder.model_copy(update={"final_norm": LayerNorm() if final else NoNorm()}),
    }
    return found.model_copy(update=changes)


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return parts.fields() | {
        "word_embed_proj_dim": parts.tokens.table_width(config.width),
        "max_position_embeddings": parts.positions,
        "do_layer_norm_before": parts.block.placement == "pre",
        "_remove_final_layer_norm": isinstance(parts.stack.final_norm, NoNorm),
        "enable_bias": parts.mixer.bias,
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
