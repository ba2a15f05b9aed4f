"""ALBERT (Lan et al. 2020): BERT with the weights of one layer for all, and a narrow table of words."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import ConfigError, FactorisedTable, Fault, ModelConfig, Stack, Tokens
from anyformer.interop.config_fields import MAX_LAYERS, Fields
from anyformer.interop.families import bert
from anyformer.interop.families.encoder_parts import HeadNames, classes, encoder_family
from anyformer.interop.family import expect
from anyformer.interop.weight_rules import AnyRule, layer_rules

DEFAULTS = bert.BertDefaults(
    vocab=30_000,
    width=4096,
    heads=64,
    ff=16_384,
    activation="gelu_new",
    dropout=0.0,
    pooler="pooler",
    classifier=0.1,
    label_dropout="classifier_dropout_prob",
)

LAYER = {
    "mixer.inner.qkv": ("attention.query", "attention.key", "attention.value"),
    "mixer.inner.out": "attention.dense",
    "mixer.norm_sum": "attention.LayerNorm",
    "feedforward.inner.up": "ffn",
    "feedforward.inner.down": "ffn_output",
    "feedforward.norm_sum": "full_layer_layer_norm",
}
HEADS = HeadNames(
    table="albert.embeddings.word_embeddings",
    dense="predictions.dense",
    norm="predictions.LayerNorm",
    bias="predictions.bias",
    decoder="predictions.decoder",
    pooler="albert.pooler",
)


def read(fields: Fields) -> ModelConfig:
    fields.must("num_hidden_groups", 1)
    fields.silent("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    table, inner = FactorisedTable(width=fields("embedding_size", 128)), fields.depth("inner_group_num", 1)
    found = bert.read_body(
        DEFAULTS, fields, fields.special(fields("vocab_size", DEFAULTS.vocab), pad=0, bos=2, eos=3), table=table
    )
    stack = expect(found.encoder, Stack, "encoder")
    if stack.depth * inner > MAX_LAYERS:
        fields.refuse("inner_group_num", f"= {inner}: {stack.depth} groups of {inner} layers exceed {MAX_LAYERS}")
    changes = {"depth": stack.depth * inner, "blocks": stack.blocks * inner, "share": True}
    return found.model_copy(update={"encoder": stack.model_copy(update=changes)})


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.encoder, Stack, "encoder")
    table = expect(expect(config.source, Tokens, "source").table, FactorisedTable, "source.table")
    if stack.prefix:
        raise ConfigError([Fault("encoder.prefix", "is there: albert has the weights of one group of layers")])
    inner = len(stack.blocks)
    sizes = {"embedding_size": table.width, "num_hidden_layers": stack.depth // inner, "inner_group_num": inner}
    found = bert.write(config) | sizes
    drop = found.pop("classifier_dropout")
    return found if drop is None else found | {"classifier_dropout_prob": drop}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.encoder
    yield from bert.embedding_rules("albert.embeddings", "albert.encoder.embedding_hidden_mapping_in")
    layers = "albert.encoder.albert_layer_groups.0.albert_layers"
    yield from layer_rules("encoder.blocks", layers, len(config.encoder.blocks), LAYER)
    yield from HEADS.rules(config)


ALBERT = encoder_family(
    "albert",
    "Albert",
    "albert",
    read,
    write,
    rules,
    heads={**classes("Albert"), "AlbertForPreTraining": "masked_lm"},
    unused=(r"albert\.pooler\..*", r"predictions\..*", r"sop_classifier\..*"),
)
