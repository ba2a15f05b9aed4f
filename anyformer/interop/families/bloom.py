"""BLOOM (BigScience 2022): ALiBi, and a norm after the embeddings."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Alibi, Gelu, ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import FieldNames
from anyformer.interop.families.decoder_frame import DecoderFields, decoder_family, decoder_rules
from anyformer.interop.families.neox import megatron_names
from anyformer.interop.family import attention
from anyformer.interop.weight_rules import AnyRule, Interleaved, Rule

ENDS = {"table": "transformer.word_embeddings", "norm": "transformer.ln_f"}
NAMES = FieldNames(
    depth="n_layer",
    heads="n_head",
    ff=None,
    activation=None,
    eps="layer_norm_epsilon",
    dropout="hidden_dropout",
    context=None,
)
LAYER = megatron_names("self_attention")
FIELDS = DecoderFields(names=NAMES, vocab=250_880, width=64, depth=2, heads=8, tied=True, bos=1, eos=2)


def read(fields: Fields) -> ModelConfig:
    fields.alias("n_embed", "hidden_size")
    fields.must("apply_residual_connection_post_layernorm", False)
    # how it was trained and run, and older names of sizes that are there under another
    fields.silent("pretraining_tp", "slow_but_exact", "masked_softmax_fusion", "attention_softmax_in_fp32")
    fields.silent("bias_dropout_fusion", "offset_alibi", "seq_length", "unk_token_id", "skip_bias_add")
    fields.silent("skip_bias_add_qkv", "n_inner")
    block = FIELDS.block(fields, bias=True, feedforward={"activation": Gelu(approximate="tanh")})
    return FIELDS.decoder(fields, block, Alibi(), tokens={"norm": block.norm})


def write(config: ModelConfig) -> dict[str, Any]:
    return FIELDS.parts(config).fields()


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    turns = Interleaved(attention(config.decoder.blocks[0]).heads)
    yield Rule("target.norm", "transformer.word_embeddings_layernorm")
    yield from decoder_rules("transformer.h", LAYER, config, conversions={"mixer.inner.qkv": turns}, **ENDS)


BLOOM = decoder_family("bloom", "Bloom", read, write, rules, prefix="transformer.", buffers=())
