"""ALBERT (Lan et al. 2020): BERT with the weights of one layer for all, and a narrow table of words."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import ConfigError, FactorisedTable, Fault, MaskedLM, ModelConfig, SpanBounds, Stack, Tokens
from anyformer.interop.config_fields import MAX_LAYERS, Fields
from anyformer.interop.families import bert
from anyformer.interop.family import Family, Framing, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Rule

DEFAULTS = bert.Defaults(
    vocab=30_000,
    width=4096,
    heads=64,
    ff=16_384,
    act="gelu_new",
    dropout=0.0,
    pooler="pooler",
    classifier=0.1,
    label_dropout="classifier_dropout_prob",
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
    embeddings = "albert.embeddings"
    yield Rule("source.table", f"{embeddings}.word_embeddings")
    yield Rule("source.types", f"{embeddings}.token_type_embeddings")
    yield Rule("encoder.embedder.tables.positions", f"{embeddings}.position_embeddings.weight")
    yield Rule("source.norm", f"{embeddings}.LayerNorm")
    yield Rule("source.project", "albert.encoder.embedding_hidden_mapping_in")
    for i in range(len(config.encoder.blocks)):
        ours, theirs = f"encoder.blocks.{i}", f"albert.encoder.albert_layer_groups.0.albert_layers.{i}"
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.attention.{part}" for part in ("query", "key", "value")))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attention.dense")
        yield Rule(f"{ours}.mixer.norm_sum", f"{theirs}.attention.LayerNorm")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.ffn")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.ffn_output")
        yield Rule(f"{ours}.feedforward.norm_sum", f"{theirs}.full_layer_layer_norm")
    if isinstance(config.head, MaskedLM):
        yield Rule("head.transform.linear", "predictions.dense")
        yield Rule("head.transform.norm", "predictions.LayerNorm")
        yield Rule("head.bias", "predictions.bias")
        yield Alias("predictions.decoder.weight", of=f"{embeddings}.word_embeddings.weight")
        yield Alias("predictions.decoder.bias", of="predictions.bias")
    elif isinstance(config.head, SpanBounds):
        yield Rule("head.linear", "qa_outputs")
    else:
        yield Rule("head.transform.linear", "albert.pooler")
        yield Rule("head.linear", "classifier")  # of tokens
        yield Rule("head.last.1", "classifier")  # of texts


ALBERT = Family(
    kind="albert",
    shape="encoder",
    heads={
        "AlbertForMaskedLM": "masked_lm",
        "AlbertForPreTraining": "masked_lm",
        "AlbertForSequenceClassification": "classifier",
        "AlbertForTokenClassification": "token_labels",
        "AlbertForQuestionAnswering": "span",
        "AlbertModel": "body",
    },
    text=Framing(before=("bos",), after=("eos",)),
    prefix="albert.",
    buffers=(r"albert\.embeddings\.(position_ids|token_type_ids)",),
    unused=(r"albert\.pooler\..*", r"predictions\..*", r"sop_classifier\..*"),
    read=read,
    write=write,
    rules=rules,
)
