"""GPT-Neo (Black et al. 2021): GPT-2 with unscaled scores and a local window in every second layer."""

from functools import partial
from itertools import groupby
from typing import Any

from anyformer.config import ConfigError, Learned, ModelConfig, Normal, Projected, Unscaled, Window, pattern_of
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families.block_fields import FieldNames
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import attention
from anyformer.interop.weight_rules import split_names

NAMES = FieldNames(
    depth="num_layers",
    heads="num_heads",
    activation="activation_function",
    eps="layer_norm_epsilon",
    embedding_dropout="embed_dropout",
    dropout="resid_dropout",
    context=None,
)
FIELDS = DecoderFields(names=NAMES, vocab=50_257, width=2048, depth=24, heads=16, tied=True, bos=50_256, eos=50_256)
FULL, NEAR = "global", "local"
LAYER = {
    "mixer.norm_in": "ln_1",
    "mixer.inner.qkv": split_names("attn.attention.{}_proj"),
    "mixer.inner.out": "attn.attention.out_proj",
    "feedforward.norm_in": "ln_2",
    "feedforward.inner.up": "mlp.c_fc",
    "feedforward.inner.down": "mlp.c_proj",
}


def read(fields: Fields) -> ModelConfig:
    fields.silent("classifier_dropout")
    ff, window = fields("intermediate_size", 4 * fields("hidden_size", FIELDS.width)), fields("window_size", 256)
    mixer = {"output": Projected(bias=True), "scale": Unscaled()}
    block = FIELDS.block(fields, mixer=mixer, feedforward={"width": ff})
    near = attention(block).model_copy(update={"pattern": Window(before=window - 1, after=0)})
    kinds = {FULL: block, NEAR: block.model_copy(update={"mixer": near})}
    layers = [kinds[kind] for kind in _kinds(fields, FIELDS.read_depth(fields))]
    found = FIELDS.decoder(fields, layers, Learned(length=fields("max_position_embeddings", 2048)))
    return found.model_copy(update={"init": Normal()})


def _kinds(fields: Fields, depth: int) -> list[str]:
    """Return the kind of each layer, which the file says twice: in short and layer by layer."""
    short = fields.maybe("attention_types", list) or [[[FULL, NEAR], 12]]
    try:
        found = [kind for kinds, times in short for _ in range(times) for kind in kinds][: depth + 1]
    except (TypeError, ValueError):
        found = []
    if len(found) != depth or not {*found} <= {FULL, NEAR}:
        what = f"must be {FULL} and {NEAR} layers with their numbers, {depth} in all"
        raise ConfigError([fields.fault("attention_types", f"= {shown(short)}: {what}")])
    fields.must("attention_layers", found)
    return found


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    patterns = [pattern_of(attention(layer), "decoder") for layer in parts.stack.unrolled()]
    sizes = [pattern.before + 1 for pattern in patterns if isinstance(pattern, Window)]
    kinds = [NEAR if isinstance(pattern, Window) else FULL for pattern in patterns]
    return parts.fields() | {
        "max_position_embeddings": parts.positions,
        "attention_types": [[[kind], len([*run])] for kind, run in groupby(kinds)],
        "window_size": max(sizes, default=256),
    }


GPT_NEO = decoder_family(
    "gpt_neo",
    "GPTNeo",
    read,
    write,
    partial(
        decoder_rules,
        "transformer.h",
        LAYER,
        positions="transformer.wpe.weight",
        table="transformer.wte",
        norm="transformer.ln_f",
    ),
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
)
