"""RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020) and CamemBERT (Martin et al. 2020): BERT with positions that
start after pad_token_id. And two of its kin: MPNet and Longformer.

MPNet (Song et al. 2020) has no token types, and one T5 bias for all layers.

Longformer (Beltagy et al. 2020) has windows, and separate projections of global tokens. In `transformers` the first
token is global where labels of a text are predicted, and here so by the pattern. Elsewhere no token is, unless
`global_attention_mask` says so; here `marks` do (2: a global token). Question answering is refused: there the tokens of
the question are global.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from anyformer.config import Block, ConfigError, Gelu, Learned, ModelConfig, T5Bias, Window
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families import bert
from anyformer.interop.families.encoder_parts import HeadNames, classes, encoder_family
from anyformer.interop.family import Family, attention, expect, map_blocks, stack_of, with_mixer, with_stack
from anyformer.interop.weight_rules import AnyRule, Rule, split_names


def read(kind: str, fields: Fields) -> ModelConfig:
    pad = fields.special(fields("vocab_size")).pad
    if pad is None:
        raise ConfigError([fields.fault("pad_token_id", "is missing: positions count from it")])
    position = Learned(length=fields("max_position_embeddings") - pad - 1, offset=pad + 1)
    return bert.BertFields(kind=kind).read(fields, position, masked=Gelu())


def write(config: ModelConfig) -> dict[str, Any]:
    position = expect(stack_of(config).position, Learned, "encoder.position")
    return bert.write(config) | {"max_position_embeddings": position.length + position.offset}


def heads(body: str) -> HeadNames:
    """Return the names of RoBERTa's heads, for a body of this name."""
    return HeadNames(
        table=f"{body}.embeddings.word_embeddings",
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        bias="lm_head.bias",
        decoder="lm_head.decoder",
        pooler=f"{body}.pooler.dense",
        labelled=("classifier.dense", "classifier.out_proj"),
    )


def _family(kind: str, title: str) -> Family:
    rules = partial(bert.rules, "roberta", heads("roberta"))
    return encoder_family(kind, title, "roberta", partial(read, kind), write, rules, unused=_unused("roberta"))


def _unused(body: str) -> tuple[str, ...]:
    return rf"{body}\.pooler\..*", r"lm_head\..*"


ROBERTA = _family("roberta", "Roberta")
XLM_ROBERTA = _family("xlm-roberta", "XLMRoberta")
CAMEMBERT = _family("camembert", "Camembert")

# -- MPNet ------------------------------------------------------------------------------------------------------------

OFFSET = 2  # `transformers` counts positions from here, whatever pad_token_id is
BIAS = T5Bias(buckets=32, max_distance=128)  # as its code has them, whatever the config says
LAYER = bert.LAYER | {
    "mixer.inner.qkv": split_names("attention.attn.{}"),
    "mixer.inner.out": "attention.attn.o",
    "mixer.norm_sum": "attention.LayerNorm",
}


def _read_mpnet(fields: Fields) -> ModelConfig:
    fields.must("relative_attention_num_buckets", BIAS.buckets)
    if (pad := fields.special(fields("vocab_size")).pad) != OFFSET - 1:
        fields.refuse("pad_token_id", f"= {pad}: positions count from the token after padding, id {OFFSET - 1}")
    position = Learned(length=fields("max_position_embeddings") - OFFSET, offset=OFFSET)
    found = bert.BertFields(kind="mpnet").read(fields, position, masked=Gelu())
    return map_blocks(found, lambda block: with_mixer(block, position=BIAS))


def _write_mpnet(config: ModelConfig) -> dict[str, Any]:
    found = write(config)
    for field in ("type_vocab_size", "classifier_dropout"):
        del found[field]
    return found


def _mpnet_rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.body_rules(config, "mpnet", LAYER)
    yield Rule("encoder.schemes.0.tables.buckets", "mpnet.encoder.relative_attention_bias.weight")
    yield from heads("mpnet").rules(config)


MPNET = encoder_family(
    "mpnet",
    "MPNet",
    "mpnet",
    _read_mpnet,
    _write_mpnet,
    _mpnet_rules,
    buffers=(r"mpnet\.embeddings\.position_ids",),
    unused=_unused("mpnet"),
)

# -- Longformer -------------------------------------------------------------------------------------------------------


def _read_longformer(fields: Fields) -> ModelConfig:
    fields.silent("onnx_export")
    found = read("longformer", fields)
    stack, first = stack_of(found), 1 if fields.head == "classifier" else 0

    def layer(reach: int) -> Block:
        pattern = Window(before=reach, after=reach, globals=first)
        return with_mixer(stack.blocks[0], pattern=pattern, global_projections=True)

    return with_stack(found, [layer(width // 2) for width in _windows(fields, stack.depth)])


def _windows(fields: Fields, depth: int) -> list[int]:
    """Return the window of each layer, in tokens: half of them before a token, half after it."""
    value = fields.any("attention_window", 512)
    widths = value if isinstance(value, list) else [value] * depth
    if len(widths) != depth or not all(type(width) is int and width > 0 and width % 2 == 0 for width in widths):
        what = f"= {shown(value)}: must be an even number above 0, or {depth} of them"
        raise ConfigError([fields.fault("attention_window", what)])
    return widths


def _write_longformer(config: ModelConfig) -> dict[str, Any]:
    found = write(config)
    del found["classifier_dropout"]
    mixers = [attention(block, "encoder") for block in stack_of(config).unrolled()]
    patterns = [expect(mixer.pattern, Window, "encoder.blocks.0.mixer.pattern") for mixer in mixers]
    return found | {"attention_window": [2 * pattern.before for pattern in patterns]}


def _longformer_rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.rules("longformer", heads("longformer"), config)
    for i in range(stack_of(config).depth):
        own = (f"longformer.encoder.layer.{i}.attention.self.{part}_global" for part in ("query", "key", "value"))
        yield Rule(f"encoder.blocks.{i}.mixer.inner.global_qkv", *own)


LONGFORMER = encoder_family(
    "longformer",
    "Longformer",
    "longformer",
    _read_longformer,
    _write_longformer,
    _longformer_rules,
    heads={name: head for name, head in classes("Longformer").items() if head != "span"},
    buffers=(r"longformer\.embeddings\.position_ids",),
    unused=_unused("longformer"),
)
