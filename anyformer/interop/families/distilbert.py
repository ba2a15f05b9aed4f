"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.families import bert
from anyformer.interop.families.encoder_parts import HeadNames, encoder_family, read_span
from anyformer.interop.family import attention, expect
from anyformer.interop.weight_rules import AnyRule, layer_rules, split_names

NORM = spec.LayerNorm(eps=1e-12)
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
    drop, act = fields("dropout", 0.1), fields.activation("activation", "gelu")
    vocab = fields("vocab_size", 30_522)
    special = fields.special(vocab, pad=0)
    mixer = spec.Attention(
        heads=fields("n_heads", 12),
        bias=True,
        output=spec.Projected(bias=True),
        dropout=fields("attention_dropout", 0.1),
    )
    feedforward = spec.Plain(width=fields("hidden_dim", 3072), activation=act)
    block = spec.Block(mixer=mixer, feedforward=feedforward, norm=NORM, placement="post", dropout=drop)
    return ModelConfig(
        width=fields("dim", 768),
        source=spec.Tokens(vocab=vocab, norm=NORM, dropout=drop, pad=special.pad),
        encoder=spec.Stack(
            depth=fields.depth("n_layers", 6),
            blocks=(block,),
            position=spec.Learned(length=fields("max_position_embeddings", 512)),
        ),
        head=_head(fields, act, drop),
        tie="output" if fields.head == "masked_lm" else "none",
        special=special,
    )


def _head(fields: Fields, act: spec.Activation, dropout: float) -> spec.Head:
    labelled, answered = fields("seq_classif_dropout", 0.2), fields("qa_dropout", 0.1)
    match fields.head:
        case "masked_lm":
            return spec.MaskedLM(transform=spec.Transform(activation=act, norm=NORM))
        case "token_labels":
            return spec.TokenLabels(labels=len(fields.labels()), dropout=dropout)
        case "span":
            return read_span(fields).model_copy(update={"dropout": answered})
        case "classifier":
            through = spec.Transform(activation=spec.Relu())
            return spec.Classifier(labels=len(fields.labels()), pool="first", transform=through, dropout=labelled)
        case _:
            return spec.NoHead()


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.encoder, spec.Stack, "encoder")
    tokens, block = expect(config.source, spec.Tokens, "source"), stack.blocks[0]
    mixer = attention(block, "encoder")
    feedforward = expect(block.feedforward, spec.Plain, "encoder.blocks.0.feedforward")
    return {
        "vocab_size": tokens.rows,
        "max_position_embeddings": expect(stack.position, spec.Learned, "encoder.position").length,
        "dim": config.width,
        "n_layers": stack.depth,
        "n_heads": mixer.heads,
        "hidden_dim": feedforward.hidden(config.width),
        "activation": name_of(feedforward.activation),
        "dropout": block.dropout,
        "attention_dropout": mixer.dropout,
        "seq_classif_dropout": config.head.dropout if isinstance(config.head, spec.Classifier) else 0.2,
        "qa_dropout": config.head.dropout if isinstance(config.head, spec.SpanBounds) else 0.1,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.encoder
    yield from bert.embedding_rules("distilbert.embeddings", "")
    yield from layer_rules("encoder.blocks", "distilbert.transformer.layer", config.encoder.depth, LAYER)
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
