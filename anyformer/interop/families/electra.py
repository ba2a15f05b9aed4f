"""ELECTRA (Clark et al. 2020): BERT without a pooler; small ones have a narrow table of words."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    Classifier,
    FactorisedTable,
    FullTable,
    Gelu,
    MaskedLM,
    ModelConfig,
    SpanBounds,
    Tokens,
    Transform,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bert
from anyformer.interop.family import Family, Framing, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Rule

DEFAULTS = bert.Defaults(width=256, heads=4, ff=1024, pooler=None, classified=Transform(activation=Gelu()))


def read(fields: Fields) -> ModelConfig:
    fields.silent("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
    narrow = fields("embedding_size", 128)
    table = FullTable() if narrow == fields("hidden_size", DEFAULTS.width) else FactorisedTable(width=narrow)
    return bert.read_body(
        DEFAULTS, fields, fields.special(fields("vocab_size", DEFAULTS.vocab), pad=0), table=table, masked=Gelu()
    )


def write(config: ModelConfig) -> dict[str, Any]:
    return bert.write(config) | {"embedding_size": expect(config.source, Tokens, "source").table_width(config.width)}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.body_rules(config, "electra")
    match config.head:
        case MaskedLM():
            yield Rule("head.transform.linear", "generator_predictions.dense")
            yield Rule("head.transform.norm", "generator_predictions.LayerNorm")
            yield Rule("head.bias", "generator_lm_head.bias")
            yield Alias("generator_lm_head.weight", of="electra.embeddings.word_embeddings.weight")
        case Classifier():
            yield Rule("head.transform.linear", "classifier.dense")
            yield Rule("head.last.1", "classifier.out_proj")
        case SpanBounds():
            yield Rule("head.linear", "qa_outputs")
        case _:
            yield Rule("head.linear", "classifier")


ELECTRA = Family(
    kind="electra",
    shape="encoder",
    heads={
        "ElectraForMaskedLM": "masked_lm",
        "ElectraForSequenceClassification": "classifier",
        "ElectraForTokenClassification": "token_labels",
        "ElectraForQuestionAnswering": "span",
        "ElectraModel": "body",
        "ElectraForPreTraining": "body",
    },
    text=Framing(before=("bos",), after=("eos",)),
    prefix="electra.",
    buffers=(r"electra\.embeddings\.(position_ids|token_type_ids)",),
    unused=(r"(discriminator|generator)_predictions\..*", r"generator_lm_head\..*"),
    read=read,
    write=write,
    rules=rules,
)
