"""BERT (Devlin et al. 2019)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import BlockFields, FieldNames
from anyformer.interop.families.encoder_parts import HeadNames, classes, encoder_family, read_span
from anyformer.interop.family import expect
from anyformer.interop.weight_rules import AnyRule, Names, Rule, layer_rules

NAMES = FieldNames(attention_dropout="attention_probs_dropout_prob", dropout="hidden_dropout_prob")
POOLER = spec.Transform(activation=spec.Tanh())
LAYER = {
    "mixer.inner.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "mixer.inner.out": "attention.output.dense",
    "mixer.norm_sum": "attention.output.LayerNorm",
    "feedforward.inner.up": "intermediate.dense",
    "feedforward.inner.down": "output.dense",
    "feedforward.norm_sum": "output.LayerNorm",
}
HEADS = HeadNames(
    table="bert.embeddings.word_embeddings",
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    bias="cls.predictions.bias",
    decoder="cls.predictions.decoder",
    pooler="bert.pooler.dense",
)


@dataclass(frozen=True, kw_only=True)
class BertDefaults(BlockFields):
    """BertDefaults of a model like BERT, and the name of its pooler."""

    names: FieldNames = NAMES
    vocab: int = 30_522
    width: int = 768
    depth: int = 12
    heads: int = 12
    ff: int = 3072
    activation: str = "gelu"
    eps: float = 1e-12
    dropout: float = 0.1
    length: int = 512
    types: int = 2
    pooler: str | None = "pooler.dense"  # None: there is none
    classified: spec.Transform = POOLER  # before labels of texts
    classifier: float | None = None  # dropout before labels; None: `dropout`
    label_dropout: str = "classifier_dropout"  # the field of that dropout


def read(fields: Fields) -> ModelConfig:
    return read_body(BertDefaults(), fields, fields.special(fields("vocab_size", 30_522), pad=0))


def read_body(
    defaults: BertDefaults,
    fields: Fields,
    special: spec.Special,
    position: spec.Position | None = None,
    table: spec.Table | None = None,
    masked: spec.Activation | None = None,
) -> ModelConfig:
    """Read BERT or a variant: with other positions, a narrow table, or another activation in the masked LM head."""
    fields.must("position_embedding_type", "absolute")
    fields.must("is_decoder", False)
    fields.must("add_cross_attention", False)
    fields.must("tie_word_embeddings", True)
    block = defaults.block(fields, bias=True, placement="post")
    act = expect(block.feedforward, spec.Plain, "feedforward").activation
    norm, drop = defaults.normed(fields), block.dropout
    length = spec.Learned(length=fields("max_position_embeddings", defaults.length))
    least = min(defaults.types, 1)
    types = fields("type_vocab_size", defaults.types, least) if uses(fields, "type_vocab_size") else 0
    tokens = spec.Tokens(
        vocab=fields("vocab_size", defaults.vocab),
        table=table or spec.FullTable(),
        types=types,
        norm=norm,
        dropout=drop,
        pad=special.pad,
    )
    return ModelConfig(
        width=fields("hidden_size", defaults.width),
        source=tokens,
        encoder=spec.Stack(depth=defaults.read_depth(fields), blocks=(block,), position=position or length),
        head=read_head(
            defaults, fields, spec.MaskedLM(transform=spec.Transform(activation=masked or act, norm=norm)), drop
        ),
        tie="output" if fields.head == "masked_lm" else "none",
        special=special,
    )


def read_head(defaults: BertDefaults, fields: Fields, masked_lm: spec.MaskedLM, dropout: float) -> spec.Head:
    """Return the head: masked LM, labels of tokens or texts, pooler, or none."""
    drop = dropout if defaults.classifier is None else defaults.classifier
    if uses(fields, defaults.label_dropout):
        given = fields.nullable(defaults.label_dropout, drop)
        drop = dropout if given is None else given
    match fields.head:
        case "masked_lm":
            return masked_lm
        case "token_labels":
            return spec.TokenLabels(labels=len(fields.labels()), dropout=drop)
        case "classifier":
            return spec.Classifier(
                labels=len(fields.labels()), pool="first", transform=defaults.classified, dropout=drop
            )
        case "span":
            return read_span(fields)
        case _:
            pooled = defaults.pooler is not None and fields.has(f"{defaults.pooler}.weight")
            return spec.Embedder(pool="first", transform=POOLER) if pooled else spec.NoHead()


def uses(fields: Fields, name: str) -> bool:
    """Return whether the family has a field: variants lack some of BERT's."""
    return fields.known is None or name in fields.known


def write(config: ModelConfig) -> dict[str, Any]:
    position = expect(expect(config.encoder, spec.Stack, "encoder").position, spec.Learned, "encoder.position")
    drop = config.head.dropout if isinstance(config.head, (spec.Classifier, spec.TokenLabels)) else None
    return write_body(config) | {"max_position_embeddings": position.length, "classifier_dropout": drop}


def write_body(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of BERT and its variants, without those of positions and heads."""
    stack, tokens = expect(config.encoder, spec.Stack, "encoder"), expect(config.source, spec.Tokens, "source")
    counts = {"vocab_size": tokens.rows, "type_vocab_size": tokens.types}
    return counts | BertDefaults().written(stack, config.width, "encoder")


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from body_rules(config, "bert")
    yield from HEADS.rules(config)


def body_rules(config: ModelConfig, body: str, names: Names = LAYER) -> Iterator[Rule]:
    """Yield the rules of the body, for BERT and variants with the same layer names."""
    assert config.encoder
    yield from embedding_rules(f"{body}.embeddings", f"{body}.embeddings_project")
    yield from layer_rules("encoder.blocks", f"{body}.encoder.layer", config.encoder.depth, names)


def embedding_rules(embeddings: str, project: str) -> Iterator[Rule]:
    """Yield the rules of the input, under the names of BERT."""
    yield Rule("source.table", f"{embeddings}.word_embeddings")
    yield Rule("source.types", f"{embeddings}.token_type_embeddings")
    yield Rule("encoder.embedder.tables.positions", f"{embeddings}.position_embeddings.weight")
    yield Rule("source.norm", f"{embeddings}.LayerNorm")
    yield Rule("source.project", project)


BERT = encoder_family(
    "bert",
    "Bert",
    "bert",
    read,
    write,
    rules,
    heads={**classes("Bert"), "BertForPreTraining": "masked_lm"},
    unused=(r"bert\.pooler\..*", r"cls\..*"),
    older=((r"LayerNorm\.gamma", "LayerNorm.weight"), (r"LayerNorm\.beta", "LayerNorm.bias")),
)
