"""GPT-NeoX (Black et al. 2022) and Pythia: attention and feed-forward side by side, a part of each head rotary."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import ModelConfig, Parallel, Sequential
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import FieldNames
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.family import attention
from anyformer.interop.weight_rules import AnyRule, Interleaved

FIELDS = DecoderFields(
    names=FieldNames(dropout="hidden_dropout", embedding_dropout="hidden_dropout"),
    vocab=50_432,
    width=6144,
    depth=44,
    heads=64,
    ff=24_576,
    activation="gelu",
    bos=0,
    eos=2,
)


def megatron_names(mixer: str) -> dict[str, str]:
    """Return the names of a layer in Megatron, which BLOOM and Falcon also have."""
    return {
        "mixer.norm_in": "input_layernorm",
        "mixer.inner.qkv": f"{mixer}.query_key_value",
        "mixer.inner.out": f"{mixer}.dense",
        "feedforward.norm_in": "post_attention_layernorm",
        "feedforward.inner.up": "mlp.dense_h_to_4h",
        "feedforward.inner.down": "mlp.dense_4h_to_h",
    }


LAYER = megatron_names("attention")


def read(fields: Fields) -> ModelConfig:
    fields.must("is_decoder", False, True)
    fields.silent("classifier_dropout")
    order = Parallel() if fields("use_parallel_residual", True) else Sequential()
    block = FIELDS.block(fields, bias=fields("attention_bias", True), order=order)
    fields.alias("rotary_emb_base", "rope_theta")  # names in older files
    fields.alias("rotary_pct", "partial_rotary_factor")
    return FIELDS.decoder(fields, block, fields.rotary(10_000.0, 0.25))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    return {
        **parts.fields(),
        **parts.rotary_fields(fraction=True),
        "use_parallel_residual": parts.block.order == Parallel(),
        "attention_bias": parts.mixer.bias,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    turns = {"mixer.inner.qkv": Interleaved(attention(config.decoder.blocks[0]).heads)}
    ends = {"table": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"}
    yield from decoder_rules("gpt_neox.layers", LAYER, config, conversions=turns, **ends)


NEOX = decoder_family(
    "gpt_neox",
    "GPTNeoX",
    read,
    write,
    rules,
    prefix="gpt_neox.",
    buffers=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    older=((r"^lm_head\.", "embed_out."),),
)
