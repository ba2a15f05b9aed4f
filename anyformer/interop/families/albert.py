"""ALBERT (Lan et al. 2020): BERT with the weights of one layer for all, and a narrow table of words."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import ConfigError, FactorisedTable, Fault, ModelConfig, Tokens
from anyformer.interop.config_fields import MAX_LAYERS, Fields
from anyformer.interop.families import bert
from anyformer.interop.families.encoder_parts import HeadNames, classes, encoder_family
from anyformer.interop.family import expect, stack_of, with_stack
from anyformer.interop.weight_rules import AnyRule, layer_rules

FIELDS = bert.BertFields(kind="albert", pooler="pooler", label_dropout="classifier_dropout_prob")

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
    table, inner = FactorisedTable(width=fields("embedding_size")), fields.depth("inner_group_num")
    found = FIELDS.read(fields, table=table)
    stack = stack_of(found)
    if stack.depth * inner > MAX_LAYERS:
        fields.refuse("inner_group_num", f"= {inner}: {stack.depth} groups of {inner} layers exceed {MAX_LAYERS}")
    return with_stack(found, depth=stack.depth * inner, blocks=stack.blocks * inner, share=True)


def write(config: ModelConfig) -> dict[str, Any]:
    stack = stack_of(config)
    table = expect(expect(config.source, Tokens, "source").table, FactorisedTable, "source.table")
    if stack.prefix:
        raise ConfigError([Fault("encoder.prefix", "is there: albert has the weights of one group of layers")])
    inner = len(stack.blocks)
    sizes = {"embedding_size": table.width, "num_hidden_layers": stack.depth // inner, "inner_group_num": inner}
    found = bert.write(config) | sizes
    drop = found.pop("classifier_dropout")
    return found if drop is None else found | {"classifier_dropout_prob": drop}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.embedding_rules("albert.embeddings", "albert.encoder.embedding_hidden_mapping_in")
    layers = "albert.encoder.albert_layer_groups.0.albert_layers"
    yield from layer_rules("encoder.blocks", layers, len(stack_of(config).blocks), LAYER)
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
