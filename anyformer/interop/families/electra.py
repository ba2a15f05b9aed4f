"""ELECTRA (Clark et al. 2020): BERT without a pooler; small ones have a narrow table of words."""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bert
from anyformer.interop.families.encoder_parts import HeadNames, classes, encoder_family
from anyformer.interop.family import expect
from anyformer.interop.weight_rules import AnyRule

DEFAULTS = bert.BertDefaults(
    width=256, heads=4, ff=1024, pooler=None, classified=spec.Transform(activation=spec.Gelu())
)

HEADS = HeadNames(
    table="electra.embeddings.word_embeddings",
    dense="generator_predictions.dense",
    norm="generator_predictions.LayerNorm",
    bias="generator_lm_head.bias",
    decoder="generator_lm_head",
    labelled=("classifier.dense", "classifier.out_proj"),
)


def read(fields: Fields) -> ModelConfig:
    fields.silent("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
    narrow = fields("embedding_size", 128)
    table = spec.FullTable() if narrow == fields("hidden_size", DEFAULTS.width) else spec.FactorisedTable(width=narrow)
    return bert.read_body(
        DEFAULTS, fields, fields.special(fields("vocab_size", DEFAULTS.vocab), pad=0), table=table, masked=spec.Gelu()
    )


def write(config: ModelConfig) -> dict[str, Any]:
    return bert.write(config) | {
        "embedding_size": expect(config.source, spec.Tokens, "source").table_width(config.width)
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.body_rules(config, "electra")
    yield from HEADS.rules(config)


ELECTRA = encoder_family(
    "electra",
    "Electra",
    "electra",
    read,
    write,
    rules,
    heads={**classes("Electra"), "ElectraForPreTraining": "body"},
    unused=(r"(discriminator|generator)_predictions\..*", r"generator_lm_head\..*"),
)
