"""Phi-1 and Phi-2 (Gunasekar et al. 2023): sublayers side by side after one norm, a part of each head rotary."""

from functools import partial
from typing import Any

from anyformer.config import LM, LayerNorm, ModelConfig, NoNorm, Parallel
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import FieldNames
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.weight_rules import split_names

NAMES = FieldNames(kv_heads="num_key_value_heads", embedding_dropout="embd_pdrop", dropout="resid_pdrop")
FIELDS = DecoderFields(names=NAMES, vocab=51_200, width=2048, depth=24, heads=32, ff=8192, bos=1, eos=2)
LAYER = {
    "norm_in": "input_layernorm",
    "mixer.inner.qkv": split_names("self_attn.{}_proj"),
    "mixer.inner.out": "self_attn.dense",
    "mixer.inner.q_norm": "self_attn.q_layernorm",
    "mixer.inner.k_norm": "self_attn.k_layernorm",
    "feedforward.inner.up": "mlp.fc1",
    "feedforward.inner.down": "mlp.fc2",
}


def read(fields: Fields) -> ModelConfig:
    fields.must("head_dim", fields("hidden_size", FIELDS.width) // fields("num_attention_heads", FIELDS.heads))
    norm = FIELDS.normed(fields) if fields("qk_layernorm", False) else NoNorm()
    block = FIELDS.block(fields, bias=True, mixer={"qk_norm": norm}, order=Parallel(shared_norm=True))
    return FIELDS.decoder(fields, block, fields.rotary(10_000.0, 0.5), head=LM(bias=True))


def write(config: ModelConfig) -> dict[str, Any]:
    parts = FIELDS.parts(config)
    normed = isinstance(parts.mixer.qk_norm, LayerNorm)
    return {**parts.fields(), **parts.rotary_fields(fraction=True), "qk_layernorm": normed}


RULES = partial(decoder_rules, "model.layers", LAYER, norm="model.final_layernorm")
PHI = decoder_family("phi", "Phi", read, write, RULES)
