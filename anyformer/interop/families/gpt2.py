"""GPT-2 (Radford et al. 2019), GPT-Neo and GPT-J.

GPT-Neo (Black et al. 2021) has unscaled scores, and a local window in every second layer. GPT-J (Wang & Komatsuzaki
2021) has sublayers side by side after one norm, and rotary pairs of neighbours.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch

from anyformer.config import (
    LM,
    ConfigError,
    InvSqrtKey,
    Learned,
    ModelConfig,
    Normal,
    Parallel,
    Projected,
    Rotary,
    Unscaled,
    position_of,
)
from anyformer.interop import rotary_fields
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families.block_fields import LayerKinds, sliding
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import attention, expect, stack_of
from anyformer.interop.weight_rules import AnyRule, Reordered, Transposed, pairs_to_halves, split_names

gpt_fields = partial(
    DecoderFields,
    width="n_embd",
    depth="n_layer",
    heads="n_head",
    ff="n_inner",
    activation="activation_function",
    eps="layer_norm_epsilon",
    attention_dropout="attn_pdrop",
    embedding_dropout="embd_pdrop",
    dropout="resid_pdrop",
    context=None,
)
FIELDS = gpt_fields(kind="gpt2")
LAYER = {
    "mixer.norm_in": "ln_1",
    "mixer.inner.qkv": "attn.c_attn",
    "mixer.inner.out": "attn.c_proj",
    "feedforward.norm_in": "ln_2",
    "feedforward.inner.up": "mlp.c_fc",
    "feedforward.inner.down": "mlp.c_proj",
}


def read(fields: Fields) -> ModelConfig:
    fields.must("add_cross_attention", False)
    fields.must("scale_attn_by_inverse_layer_idx", False)
    fields.silent("reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation")
    fields.silent("summary_proj_to_labels", "summary_first_dropout")
    scale = InvSqrtKey() if fields("scale_attn_weights") else Unscaled()
    block = FIELDS.block(fields, bias=True, mixer={"scale": scale})
    found = FIELDS.decoder(fields, block, Learned(length=fields("n_positions")))
    return found.model_copy(update={"init": Normal(residual=True)})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return parts.fields() | {
        "n_positions": parts.positions,
        "scale_attn_weights": parts.mixer.scale == InvSqrtKey(),
    }


rules = partial(
    decoder_rules,
    "transformer.h",
    LAYER,
    conversions={part: Transposed() for part in LAYER if ".inner." in part},
    positions="transformer.wpe.weight",
    table="transformer.wte",
    norm="transformer.ln_f",
)
GPT2 = decoder_family(
    "gpt2",
    "GPT2",
    read,
    write,
    rules,
    heads={"GPT2LMHeadModel": "lm", "GPT2Model": "body"},
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)

# -- GPT-Neo -----------------------------------------------------------------------------------------------------------

GPT_NEO_FIELDS = DecoderFields(
    kind="gpt_neo",
    depth="num_layers",
    heads="num_heads",
    activation="activation_function",
    eps="layer_norm_epsilon",
    embedding_dropout="embed_dropout",
    dropout="resid_dropout",
    context=None,
)
FULL, NEAR = "global", "local"
GPT_NEO_LAYER = {
    "mixer.norm_in": "ln_1",
    "mixer.inner.qkv": split_names("attn.attention.{}_proj"),
    "mixer.inner.out": "attn.attention.out_proj",
    "feedforward.norm_in": "ln_2",
    "feedforward.inner.up": "mlp.c_fc",
    "feedforward.inner.down": "mlp.c_proj",
}


def _read_gpt_neo(fields: Fields) -> ModelConfig:
    fields.silent("classifier_dropout")
    ff, window = fields("intermediate_size", 4 * fields("hidden_size")), fields("window_size")
    mixer = {"output": Projected(bias=True), "scale": Unscaled()}
    block = GPT_NEO_FIELDS.block(fields, mixer=mixer, feedforward={"width": ff})
    kinds = {FULL: block, NEAR: sliding(block, window)}
    layers = [kinds[kind] for kind in _kinds(fields, GPT_NEO_FIELDS.read_depth(fields))]
    found = GPT_NEO_FIELDS.decoder(fields, layers, Learned(length=fields("max_position_embeddings")))
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


def _write_gpt_neo(config: ModelConfig) -> dict[str, Any]:
    parts = GPT_NEO_FIELDS.parts(config)
    layers = LayerKinds.of(parts.stack.unrolled())
    kinds = (NEAR if kind == rotary_fields.NEAR else FULL for kind in layers.kinds)
    return parts.fields() | {
        "max_position_embeddings": parts.positions,
        "attention_types": [[[kind], len([*run])] for kind, run in groupby(kinds)],
        "window_size": layers.size or GPT_NEO_FIELDS.default("window_size"),
    }


GPT_NEO = decoder_family(
    "gpt_neo",
    "GPTNeo",
    _read_gpt_neo,
    _write_gpt_neo,
    partial(
        decoder_rules,
        "transformer.h",
        GPT_NEO_LAYER,
        positions="transformer.wpe.weight",
        table="transformer.wte",
        norm="transformer.ln_f",
    ),
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
)

# -- GPT-J -------------------------------------------------------------------------------------------------------------

GPTJ_FIELDS = gpt_fields(kind="gptj", context="n_positions")
GPTJ_LAYER = {
    "norm_in": "ln_1",
    "mixer.inner.qkv": split_names("attn.{}_proj"),
    "mixer.inner.out": "attn.out_proj",
    "feedforward.inner.up": "mlp.fc_in",
    "feedforward.inner.down": "mlp.fc_out",
}


def _read_gptj(fields: Fields) -> ModelConfig:
    width, heads, rotated = fields("n_embd"), fields("n_head"), fields("rotary_dim")
    if rotated * heads > width:
        raise ConfigError([fields.fault("rotary_dim", f"= {rotated}: must be at most the width of a head")])
    block = GPTJ_FIELDS.block(fields, order=Parallel(shared_norm=True))
    position = Rotary(fraction=_fraction(rotated, width // heads))
    found = GPTJ_FIELDS.decoder(fields, block, position, head=LM(bias=True))
    return found.model_copy(update={"context": found.context or GPTJ_FIELDS.length})


def _fraction(rotated: int, key_width: int) -> float:
    """Return the part of a head that is `rotated` wide when rounded down."""
    part = rotated / key_width
    return part if int(key_width * part) == rotated else math.nextafter(part, 1)


def _write_gptj(config: ModelConfig) -> dict[str, Any]:
    parts = GPTJ_FIELDS.parts(config)
    rotated = parts.rotary.rotated(parts.key)
    return parts.fields() | {"n_positions": config.context or GPTJ_FIELDS.length, "rotary_dim": rotated}


def _gptj_rules(config: ModelConfig) -> Iterator[AnyRule]:
    stack = stack_of(config)
    mixer = attention(stack.blocks[0])
    key, rotary = mixer.widths(config.width)[0], expect(position_of(mixer, stack), Rotary, "decoder.position")
    pairs = pairs_to_halves(mixer.heads, key, rotary.rotated(key))
    qkv = {"mixer.inner.qkv": Reordered.parts(pairs, pairs, torch.arange(mixer.heads * key))}
    ends = {"table": "transformer.wte", "norm": "transformer.ln_f"}
    yield from decoder_rules("transformer.h", GPTJ_LAYER, config, conversions=qkv, **ends)


BUFFERS = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",)
GPTJ = decoder_family("gptj", "GPTJ", _read_gptj, _write_gptj, _gptj_rules, prefix="transformer.", buffers=BUFFERS)
