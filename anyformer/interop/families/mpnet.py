"""MPNet (Song et al. 2020): RoBERTa without token types, and with one T5 bias for all layers."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Classifier, Gelu, Learned, MaskedLM, ModelConfig, SpanBounds, Stack, T5Bias
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bert, roberta
from anyformer.interop.family import Family, Framing, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Rule

OFFSET = 2  # `transformers` counts positions from here, whatever pad_token_id is
BIAS = T5Bias(buckets=32, max_distance=128)  # as its code has them, whatever the config says


def read(fields: Fields) -> ModelConfig:
    fields.must("relative_attention_num_buckets", BIAS.buckets)
    special = fields.special(fields("vocab_size", 30_527), pad=1, bos=0, eos=2)
    if special.pad != OFFSET - 1:
        fields.refuse("pad_token_id", f"= {special.pad}: positions count from the token after padding, id {OFFSET - 1}")
    position = Learned(length=fields("max_position_embeddings", 512) - OFFSET, offset=OFFSET)
    found = bert.read_body(bert.Defaults(vocab=30_527), fields, special, position, masked=Gelu())
    stack = expect(found.encoder, Stack, "encoder")
    block = stack.blocks[0]
    mixer = attention(block, "encoder").model_copy(update={"position": BIAS})
    blocks = (block.model_copy(update={"mixer": mixer}),)
    return found.model_copy(update={"encoder": stack.model_copy(update={"blocks": blocks})})


def write(config: ModelConfig) -> dict[str, Any]:
    found = roberta.write(config)
    for field in ("type_vocab_size", "classifier_dropout"):
        del found[field]
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.encoder
    yield Rule("source.table", "mpnet.embeddings.word_embeddings")
    yield Rule("encoder.embedder.tables.positions", "mpnet.embeddings.position_embeddings.weight")
    yield Rule("source.norm", "mpnet.embeddings.LayerNorm")
    yield Rule("encoder.schemes.0.tables.buckets", "mpnet.encoder.relative_attention_bias.weight")
    for i in range(config.encoder.depth):
        ours, theirs = f"encoder.blocks.{i}", f"mpnet.encoder.layer.{i}"
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.attention.attn.{part}" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attention.attn.o")
        yield Rule(f"{ours}.mixer.norm_sum", f"{theirs}.attention.LayerNorm")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.intermediate.dense")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.output.dense")
        yield Rule(f"{ours}.feedforward.norm_sum", f"{theirs}.output.LayerNorm")
    match config.head:
        case MaskedLM():
            yield Rule("head.transform.linear", "lm_head.dense")
            yield Rule("head.transform.norm", "lm_head.layer_norm")
            yield Rule("head.bias", "lm_head.bias")
            yield Alias("lm_head.decoder.weight", of="mpnet.embeddings.word_embeddings.weight")
            yield Alias("lm_head.decoder.bias", of="lm_head.bias")
        case Classifier():
            yield Rule("head.transform.linear", "classifier.dense")
            yield Rule("head.last.1", "classifier.out_proj")
        case SpanBounds():
            yield Rule("head.linear", "qa_outputs")
        case _:
            yield Rule("head.transform.linear", "mpnet.pooler.dense")
            yield Rule("head.linear", "classifier")


MPNET = Family(
    kind="mpnet",
    shape="encoder",
    heads={
        "MPNetForMaskedLM": "masked_lm",
        "MPNetForSequenceClassification": "classifier",
        "MPNetForTokenClassification": "token_labels",
        "MPNetForQuestionAnswering": "span",
        "MPNetModel": "body",
    },
    text=Framing(before=("bos",), after=("eos",)),
    prefix="mpnet.",
    buffers=(r"mpnet\.embeddings\.position_ids",),
    unused=(r"mpnet\.pooler\..*", r"lm_head\..*"),
    read=read,
    write=write,
    rules=rules,
)
