"""BERT (Devlin et al. 2019), ELECTRA and BigBird.

ELECTRA (Clark et al. 2020) has no pooler; small ones have a narrow table of words.

BigBird (Zaheer et al. 2020) is read with full attention: BERT with optional biases and scaled embeddings. Its
block-sparse attention is refused, since no pattern of positions equals what `transformers` computes with it. In
evaluation every random link is to the first block, which so counts 1 + num_random_blocks times. The last block of a
padded row is global, so that a text's output depends on the rows beside it. And after one text of at most
`dense_length` tokens a model computes full attention for all later texts, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig, SqrtWidth, Tokens, Transform, Unscaled
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.families.encoder_parts import HeadNames, classes, encoder_family, read_head
from anyformer.interop.family import attention, expect, map_blocks, stack_of, with_mixer
from anyformer.interop.weight_rules import AnyRule, Names, Rule, layer_rules

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
class BertFields(BlockFields):
    """The fields of a model like BERT, and the name of its pooler."""

    kind: str = "bert"
    attention_dropout: str | None = "attention_probs_dropout_prob"
    dropout: str | None = "hidden_dropout_prob"
    pooler: str | None = "pooler.dense"  # None: there is none
    classified: spec.Transform = POOLER  # before labels of texts
    label_dropout: str = "classifier_dropout"  # the field of the dropout before labels; by default that of the blocks

    def read(
        self,
        fields: Fields,
        position: spec.Position | None = None,
        table: spec.Table | None = None,
        masked: spec.Activation | None = None,
    ) -> ModelConfig:
        """Read BERT or a variant: with other positions, a narrow table, or another activation in the masked LM head."""
        fields.must("position_embedding_type", "absolute")
        fields.must("is_decoder", False)
        fields.must("add_cross_attention", False)
        fields.must("tie_word_embeddings", True)
        block = self.block(fields, bias=True, placement="post")
        act = expect(block.feedforward, spec.Plain, "feedforward").activation
        norm, drop, vocab = self.normed(fields), block.dropout, fields("vocab_size")
        special, length = fields.special(vocab), spec.Learned(length=fields("max_position_embeddings"))
        types = fields.default("type_vocab_size")
        types = 0 if types is None else fields("type_vocab_size", types, min(types, 1))
        head = spec.MaskedLM(transform=spec.Transform(activation=masked or act, norm=norm))
        return ModelConfig(
            width=fields(self.width),
            source=spec.Tokens(
                vocab=vocab, table=table or spec.FullTable(), types=types, norm=norm, dropout=drop, pad=special.pad
            ),
            encoder=spec.Stack(depth=self.read_depth(fields), blocks=(block,), position=position or length),
            head=self._head(fields, head, drop),
            tie="output" if fields.head == "masked_lm" else "none",
            special=special,
        )

    def _head(self, fields: Fields, masked_lm: spec.MaskedLM, dropout: float) -> spec.Head:
        """Return the head: masked LM, labels of tokens or texts, pooler, or none."""
        given = fields.nullable(self.label_dropout, float) if uses(fields, self.label_dropout) else None
        drop = {"dropout": dropout if given is None else given}
        pooled = fields.head == "body" and self.pooler is not None and fields.has(f"{self.pooler}.weight")
        body = spec.Embedder(pool="first", transform=POOLER) if pooled else spec.NoHead()
        return read_head(fields, masked_lm, body, text={"transform": self.classified, **drop}, tokens=drop)


BERT_FIELDS = BertFields()


def uses(fields: Fields, name: str) -> bool:
    """Return whether the family has a field: variants lack some of BERT's."""
    return fields.known is None or name in fields.known


def write(config: ModelConfig) -> dict[str, Any]:
    position = expect(stack_of(config).position, spec.Learned, "encoder.position")
    drop = config.head.dropout if isinstance(config.head, (spec.Classifier, spec.TokenLabels)) else None
    return write_body(config) | {"max_position_embeddings": position.length, "classifier_dropout": drop}


def write_body(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of BERT and its variants, without those of positions and heads."""
    tokens = expect(config.source, spec.Tokens, "source")
    counts = {"vocab_size": tokens.rows, "type_vocab_size": tokens.types}
    return counts | BERT_FIELDS.written(stack_of(config), config.width, "encoder")


def rules(body: str, heads: HeadNames, config: ModelConfig) -> Iterator[AnyRule]:
    """Yield the rules of BERT or a variant, by the names of its body and its heads."""
    yield from body_rules(config, body)
    yield from heads.rules(config)


def body_rules(config: ModelConfig, body: str, names: Names = LAYER) -> Iterator[Rule]:
    """Yield the rules of the body, for BERT and variants with the same layer names."""
    yield from embedding_rules(f"{body}.embeddings", f"{body}.embeddings_project")
    yield from layer_rules("encoder.blocks", f"{body}.encoder.layer", stack_of(config).depth, names)


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
    BERT_FIELDS.read,
    write,
    partial(rules, "bert", HEADS),
    heads={**classes("Bert"), "BertForPreTraining": "masked_lm"},
    unused=(r"bert\.pooler\..*", r"cls\..*"),
    older=((r"LayerNorm\.gamma", "LayerNorm.weight"), (r"LayerNorm\.beta", "LayerNorm.bias")),
)

# -- ELECTRA -----------------------------------------------------------------------------------------------------------

ELECTRA_FIELDS = BertFields(kind="electra", pooler=None, classified=spec.Transform(activation=spec.Gelu()))
ELECTRA_HEADS = HeadNames(
    table="electra.embeddings.word_embeddings",
    dense="generator_predictions.dense",
    norm="generator_predictions.LayerNorm",
    bias="generator_lm_head.bias",
    decoder="generator_lm_head",
    labelled=("classifier.dense", "classifier.out_proj"),
)


def _read_electra(fields: Fields) -> ModelConfig:
    fields.silent("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
    narrow = fields("embedding_size")
    table = spec.FullTable() if narrow == fields("hidden_size") else spec.FactorisedTable(width=narrow)
    return ELECTRA_FIELDS.read(fields, table=table, masked=spec.Gelu())


def _write_electra(config: ModelConfig) -> dict[str, Any]:
    tokens = expect(config.source, spec.Tokens, "source")
    return write(config) | {"embedding_size": tokens.table_width(config.width)}


ELECTRA = encoder_family(
    "electra",
    "Electra",
    "electra",
    _read_electra,
    _write_electra,
    partial(rules, "electra", ELECTRA_HEADS),
    heads={**classes("Electra"), "ElectraForPreTraining": "body"},
    unused=(r"(discriminator|generator)_predictions\..*", r"generator_lm_head\..*"),
)

# -- BigBird -----------------------------------------------------------------------------------------------------------

BIG_BIRD_HEADS = replace(HEADS, pooler="bert.pooler", labelled=("classifier.dense", "classifier.out_proj"))


def dense_length(block: int, randoms: int) -> int:
    """Return the length up to which `transformers` computes full attention for a block-sparse model."""
    return (5 + 2 * randoms) * block


def _read_big_bird(fields: Fields) -> ModelConfig:
    longest = dense_length(fields("block_size"), fields("num_random_blocks", least=0))
    if (kind := fields.maybe("attention_type", str)) not in (None, "original_full"):
        what = f"transformers repeats the first block in place of random ones in texts of more than {longest} tokens"
        hint = "--ignore-field attention_type reads it with full attention, which is exact for shorter texts"
        fields.refuse("attention_type", f"= {kind!r}: {what}; {hint}")
    classified = Transform(activation=fields.activation("hidden_act"))
    found = BertFields(kind="big_bird", pooler="pooler", classified=classified).read(fields)
    bias, scale = fields("use_bias"), SqrtWidth() if fields("rescale_embeddings") else Unscaled()
    tokens = expect(found.source, Tokens, "source").model_copy(update={"scale": scale})
    return map_blocks(found.model_copy(update={"source": tokens}), lambda block: with_mixer(block, bias=bias))


def _write_big_bird(config: ModelConfig) -> dict[str, Any]:
    mixer = attention(stack_of(config).blocks[0], "encoder")
    scaled = isinstance(expect(config.source, Tokens, "source").scale, SqrtWidth)
    kind = {"attention_type": "original_full", "use_bias": mixer.bias, "rescale_embeddings": scaled}
    return write(config) | kind


BIG_BIRD = encoder_family(
    "big_bird",
    "BigBird",
    "bert",
    _read_big_bird,
    _write_big_bird,
    partial(rules, "bert", BIG_BIRD_HEADS),
    heads={
        **{name: head for name, head in classes("BigBird").items() if head != "span"},  # which has further layers
        "BigBirdForPreTraining": "masked_lm",
    },
    unused=(r"bert\.pooler\..*", r"cls\..*"),
)
