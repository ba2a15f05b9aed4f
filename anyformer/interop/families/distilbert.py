"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bert
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.families.encoder_parts import HeadNames, encoder_family, read_head
from anyformer.interop.family import expect, stack_of
from anyformer.interop.weight_rules import AnyRule, layer_rules, split_names

NORM = spec.LayerNorm(eps=1e-12)
FIELDS = BlockFields(
    kind="distilbert",
    width="dim",
    depth="n_layers",
    heads="n_heads",
    ff="hidden_dim",
    activation="activation",
    eps=None,
    dropout="dropout",
    norm_options={"eps": 1e-12},
)
LAYER = {
    "mixer.inner.qkv": split_names("attention.{}_lin"),
    "mixer.inner.out": "attention.out_lin",
    "mixer.norm_sum": "sa_layer_norm",
    "feedforward.inner.up": "ffn.lin1",
    "feedforward.inner.down": "ffn.lin2",
    "feedforward.norm_sum": "output_layer_norm",
}
HEADS = HeadNames(
    table="distilbert.embeddings.word_embeddings",
    dense="vocab_transform",
    norm="vocab_layer_norm",
    bias="vocab_projector.bias",
    decoder="vocab_projector",
    labelled=("pre_classifier", "classifier"),
)


def read(fields: Fields) -> ModelConfig:
    fields.must("tie_word_embeddings", True)
    fields.silent("sinusoidal_pos_embds", "tie_weights_")  # positions are in the file, however they began
    block, vocab = FIELDS.block(fields, bias=True, placement="post"), fields("vocab_size")
    special, drop = fields.special(vocab), block.dropout
    act = expect(block.feedforward, spec.Plain, "feedforward").activation
    return ModelConfig(
        width=fields(FIELDS.width),
        source=spec.Tokens(vocab=vocab, norm=NORM, dropout=drop, pad=special.pad),
        encoder=spec.Stack(
            depth=FIELDS.read_depth(fields),
            blocks=(block,),
            position=spec.Learned(length=fields("max_position_embeddings")),
        ),
        head=_head(fields, act, drop),
        tie="output" if fields.head == "masked_lm" else "none",
        special=special,
    )


def _head(fields: Fields, act: spec.Activation, dropout: float) -> spec.Head:
    return read_head(
        fields,
        spec.MaskedLM(transform=spec.Transform(activation=act, norm=NORM)),
        spec.NoHead(),
        text={"transform": spec.Transform(activation=spec.Relu()), "dropout": fields("seq_classif_dropout")},
        tokens={"dropout": dropout},
        span={"dropout": fields("qa_dropout")},
    )


def write(config: ModelConfig) -> dict[str, Any]:
    stack, tokens = stack_of(config), expect(config.source, spec.Tokens, "source")
    return FIELDS.written(stack, config.width, "encoder") | {
        "vocab_size": tokens.rows,
        "max_position_embeddings": expect(stack.position, spec.Learned, "encoder.position").length,
        "seq_classif_dropout": config.head.dropout if isinstance(config.head, spec.Classifier) else 0.2,
        "qa_dropout": config.head.dropout if isinstance(config.head, spec.SpanBounds) else 0.1,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.embedding_rules("distilbert.embeddings", "")
    yield from layer_rules("encoder.blocks", "distilbert.transformer.layer", stack_of(config).depth, LAYER)
    yield from HEADS.rules(config)


DISTILBERT = encoder_family(
    "distilbert",
    "DistilBert",
    "distilbert",
    read,
    write,
    rules,
    buffers=(),
    unused=(r"vocab_(transform|layer_norm|projector)\..*",),
)
