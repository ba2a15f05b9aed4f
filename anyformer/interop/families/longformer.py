"""Longformer (Beltagy et al. 2020): RoBERTa with windows, and separate projections of global tokens.

In `transformers` the first token is global where labels of a text are predicted, and here so by the pattern. Elsewhere
no token is, unless `global_attention_mask` says so; here `marks` do (2: a global token). Question answering is refused:
there the tokens of the question are global.
"""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Block, ConfigError, Gelu, Learned, ModelConfig, Stack, Window
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families import bert, roberta
from anyformer.interop.families.encoder_parts import classes, encoder_family
from anyformer.interop.family import attention, expect, tile_layers
from anyformer.interop.weight_rules import AnyRule, Rule

VOCAB = 30_522


def read(fields: Fields) -> ModelConfig:
    fields.silent("onnx_export")
    special = fields.special(fields("vocab_size", VOCAB), pad=1, bos=0, eos=2)
    if special.pad is None:
        raise ConfigError([fields.fault("pad_token_id", "is missing: positions count from it")])
    offset = special.pad + 1
    position = Learned(length=fields("max_position_embeddings", 512) - offset, offset=offset)
    found = bert.read_body(bert.BertDefaults(vocab=VOCAB), fields, special, position, masked=Gelu())
    stack = expect(found.encoder, Stack, "encoder")
    first = 1 if fields.head == "classifier" else 0
    layers = tile_layers([_layer(stack.blocks[0], width // 2, first) for width in _windows(fields, stack.depth)])
    return found.model_copy(update={"encoder": stack.model_copy(update=layers._asdict())})


def _windows(fields: Fields, depth: int) -> list[int]:
    """Return the window of each layer, in tokens: half of them before a token, half after it."""
    value = fields.any("attention_window", 512)
    widths = value if isinstance(value, list) else [value] * depth
    if len(widths) != depth or not all(type(width) is int and width > 0 and width % 2 == 0 for width in widths):
        what = f"= {shown(value)}: must be an even number above 0, or {depth} of them"
        raise ConfigError([fields.fault("attention_window", what)])
    return widths


def _layer(block: Block, reach: int, first: int) -> Block:
    pattern = Window(before=reach, after=reach, globals=first)
    mixer = attention(block, "encoder").model_copy(update={"pattern": pattern, "global_projections": True})
    return block.model_copy(update={"mixer": mixer})


def write(config: ModelConfig) -> dict[str, Any]:
    found = roberta.write(config)
    del found["classifier_dropout"]
    mixers = [attention(block, "encoder") for block in expect(config.encoder, Stack, "encoder").unrolled()]
    patterns = [expect(mixer.pattern, Window, "encoder.blocks.0.mixer.pattern") for mixer in mixers]
    return found | {"attention_window": [2 * pattern.before for pattern in patterns]}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.body_rules(config, "longformer")
    for i in range(expect(config.encoder, Stack, "encoder").depth):
        own = (f"longformer.encoder.layer.{i}.attention.self.{part}_global" for part in ("query", "key", "value"))
        yield Rule(f"encoder.blocks.{i}.mixer.inner.global_qkv", *own)
    yield from roberta.heads("longformer").rules(config)


LONGFORMER = encoder_family(
    "longformer",
    "Longformer",
    "longformer",
    read,
    write,
    rules,
    heads={name: head for name, head in classes("Longformer").items() if head != "span"},
    buffers=(r"longformer\.embeddings\.position_ids",),
    unused=(r"longformer\.pooler\..*", r"lm_head\..*"),
)
