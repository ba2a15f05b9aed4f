"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    Activation,
    Attention,
    Block,
    Classifier,
    Head,
    LayerNorm,
    Learned,
    MaskedLM,
    ModelConfig,
    NoHead,
    Plain,
    Projected,
    Relu,
    SpanBounds,
    Stack,
    TokenLabels,
    Tokens,
    Transform,
    hidden_width,
)
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.families.bert import read_span
from anyformer.interop.family import Family, Framing, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Rule

NORM = LayerNorm(eps=1e-12)


def read(fields: Fields) -> ModelConfig:
    fields.must("tie_word_embeddings", True)
    fields.silent("sinusoidal_pos_embds", "tie_weights_")  # positions are in the file, however they began
    drop, act = fields("dropout", 0.1), fields.activation("activation", "gelu")
    vocab = fields("vocab_size", 30_522)
    special = fields.special(vocab, pad=0)
    mixer = Attention(
        heads=fields("n_heads", 12), bias=True, output=Projected(bias=True), dropout=fields("attention_dropout", 0.1)
    )
    feedforward = Plain(width=fields("hidden_dim", 3072), activation=act)
    block = Block(mixer=mixer, feedforward=feedforward, norm=NORM, placement="post", dropout=drop)
    return ModelConfig(
        width=fields("dim", 768),
        source=Tokens(vocab=vocab, norm=NORM, dropout=drop, pad=special.pad),
        encoder=Stack(
            depth=fields.depth("n_layers", 6),
            blocks=(block,),
            position=Learned(length=fields("max_position_embeddings", 512)),
        ),
        head=_head(fields, act, drop),
        tie="output" if fields.head == "masked_lm" else "none",
        special=special,
    )


def _head(fields: Fields, act: Activation, dropout: float) -> Head:
    labelled, answered = fields("seq_classif_dropout", 0.2), fields("qa_dropout", 0.1)
    match fields.head:
        case "masked_lm":
            return MaskedLM(transform=Transform(activation=act, norm=NORM))
        case "token_labels":
            return TokenLabels(labels=len(fields.labels()), dropout=dropout)
        case "span":
            return read_span(fields).model_copy(update={"dropout": answered})
        case "classifier":
            through = Transform(activation=Relu())
            return Classifier(labels=len(fields.labels()), pool="first", transform=through, dropout=labelled)
        case _:
            return NoHead()


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.encoder, Stack, "encoder")
    tokens, block = expect(config.source, Tokens, "source"), stack.blocks[0]
    mixer = attention(block, "encoder")
    feedforward = expect(block.feedforward, Plain, "encoder.blocks.0.feedforward")
    return {
        "vocab_size": tokens.rows,
        "max_position_embeddings": expect(stack.position, Learned, "encoder.position").length,
        "dim": config.width,
        "n_layers": stack.depth,
        "n_heads": mixer.heads,
        "hidden_dim": hidden_width(feedforward, config.width),
        "activation": name_of(feedforward.activation),
        "dropout": block.dropout,
        "attention_dropout": mixer.dropout,
        "seq_classif_dropout": config.head.dropout if isinstance(config.head, Classifier) else 0.2,
        "qa_dropout": config.head.dropout if isinstance(config.head, SpanBounds) else 0.1,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.encoder
    yield Rule("source.table", "distilbert.embeddings.word_embeddings")
    yield Rule("encoder.embedder.tables.positions", "distilbert.embeddings.position_embeddings.weight")
    yield Rule("source.norm", "distilbert.embeddings.LayerNorm")
    for i in range(config.encoder.depth):
        ours, theirs = f"encoder.blocks.{i}", f"distilbert.transformer.layer.{i}"
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.attention.{part}_lin" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attention.out_lin")
        yield Rule(f"{ours}.mixer.norm_sum", f"{theirs}.sa_layer_norm")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.ffn.lin1")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.ffn.lin2")
        yield Rule(f"{ours}.feedforward.norm_sum", f"{theirs}.output_layer_norm")
    if isinstance(config.head, MaskedLM):
        yield Rule("head.transform.linear", "vocab_transform")
        yield Rule("head.transform.norm", "vocab_layer_norm")
        yield Rule("head.bias", "vocab_projector.bias")
        yield Alias("vocab_projector.weight", of="distilbert.embeddings.word_embeddings.weight")
    elif isinstance(config.head, SpanBounds):
        yield Rule("head.linear", "qa_outputs")
    else:
        yield Rule("head.transform.linear", "pre_classifier")
        yield Rule("head.linear", "classifier")  # of tokens
        yield Rule("head.last.1", "classifier")  # of texts


DISTILBERT = Family(
    kind="distilbert",
    shape="encoder",
    heads={
        "DistilBertForMaskedLM": "masked_lm",
        "DistilBertForSequenceClassification": "classifier",
        "DistilBertForTokenClassification": "token_labels",
        "DistilBertForQuestionAnswering": "span",
        "DistilBertModel": "body",
    },
    text=Framing(before=("bos",), after=("eos",)),
    prefix="distilbert.",
    unused=(r"vocab_(transform|layer_norm|projector)\..*",),
    read=read,
    write=write,
    rules=rules,
)
