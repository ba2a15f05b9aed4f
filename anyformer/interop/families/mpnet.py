"""MPNet (Song et al. 2020): RoBERTa without token types, and with one T5 bias for all layers."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Gelu, Learned, ModelConfig, Stack, T5Bias
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bert, roberta
from anyformer.interop.families.encoder_parts import encoder_family
from anyformer.interop.family import attention, expect
from anyformer.interop.weight_rules import AnyRule, Rule, split_names

OFFSET = 2  # `transformers` counts positions from here, whatever pad_token_id is
BIAS = T5Bias(buckets=32, max_distance=128)  # as its code has them, whatever the config says

LAYER = bert.LAYER | {
    "mixer.inner.qkv": split_names("attention.attn.{}"),
    "mixer.inner.out": "attention.attn.o",
    "mixer.norm_sum": "attention.LayerNorm",
}


def read(fields: Fields) -> ModelConfig:
    fields.must("relative_attention_num_buckets", BIAS.buckets)
    special = fields.special(fields("vocab_size", 30_527), pad=1, bos=0, eos=2)
    if special.pad != OFFSET - 1:
        fields.refuse("pad_token_id", f"= {special.pad}: positions count from the token after padding, id {OFFSET - 1}")
    position = Learned(length=fields("max_position_embeddings", 512) - OFFSET, offset=OFFSET)
    found = bert.read_body(bert.BertDefaults(vocab=30_527), fields, special, position, masked=Gelu())
    stack = expect(found.encoder, Stack, "encoder")
    block = stack.blocks[0]
    mixer = attention(block, "encoder").model_copy(update={"position": BIAS})
    blocks = (block.model_copy(update={"mixer": mixer}),)
    return found.model_copy(update={"encoder": stack.model_copy(update={"blocks": blocks})})


def write(config: ModelConfig) -> dict[str, Any]:
    found = roberta.write(config)
    for field in ("type_vocab_size", "classifier_dropout"):
        del found[field]
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.body_rules(config, "mpnet", LAYER)
    yield Rule("encoder.schemes.0.tables.buckets", "mpnet.encoder.relative_attention_bias.weight")
    yield from roberta.heads("mpnet").rules(config)


MPNET = encoder_family(
    "mpnet",
    "MPNet",
    "mpnet",
    read,
    write,
    rules,
    buffers=(r"mpnet\.embeddings\.position_ids",),
    unused=(r"mpnet\.pooler\..*", r"lm_head\..*"),
)
