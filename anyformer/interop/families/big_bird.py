"""BigBird (Zaheer et al. 2020) with full attention: BERT with optional biases and scaled embeddings.

Its block-sparse attention is refused, since no pattern of positions equals what `transformers` computes with it. In
evaluation every random link is to the first block, which so counts 1 + num_random_blocks times. The last block of a
padded row is global, so that a text's output depends on the rows beside it. And after one text of at most
`dense_length` tokens a model computes full attention for all later texts, too.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anyformer.config import ModelConfig, SqrtWidth, Stack, Tokens, Transform, Unscaled
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bert
from anyformer.interop.families.encoder_parts import classes, encoder_family
from anyformer.interop.family import attention, expect
from anyformer.interop.weight_rules import AnyRule

HEADS = replace(bert.HEADS, pooler="bert.pooler", labelled=("classifier.dense", "classifier.out_proj"))


def dense_length(block: int, randoms: int) -> int:
    """Return the length up to which `transformers` computes full attention for a block-sparse model."""
    return (5 + 2 * randoms) * block


def read(fields: Fields) -> ModelConfig:
    longest = dense_length(fields("block_size", 64), fields("num_random_blocks", 3, 0))
    if (kind := fields.maybe("attention_type", str)) not in (None, "original_full"):
        what = f"transformers repeats the first block in place of random ones in texts of more than {longest} tokens"
        hint = "--ignore-field attention_type reads it with full attention, which is exact for shorter texts"
        fields.refuse("attention_type", f"= {kind!r}: {what}; {hint}")
    act = fields.activation("hidden_act", "gelu_new")
    defaults = bert.BertDefaults(
        vocab=50_358, activation="gelu_new", length=4096, pooler="pooler", classified=Transform(activation=act)
    )
    special = fields.special(fields("vocab_size", defaults.vocab), pad=0, bos=1, eos=2)
    found = bert.read_body(defaults, fields, special)
    stack, tokens = expect(found.encoder, Stack, "encoder"), expect(found.source, Tokens, "source")
    block = stack.blocks[0]
    mixer = attention(block, "encoder").model_copy(update={"bias": fields("use_bias", True)})
    scale = SqrtWidth() if fields("rescale_embeddings", False) else Unscaled()
    blocks = (block.model_copy(update={"mixer": mixer}),)
    changes = {
        "encoder": stack.model_copy(update={"blocks": blocks}),
        "source": tokens.model_copy(update={"scale": scale}),
    }
    return found.model_copy(update=changes)


def write(config: ModelConfig) -> dict[str, Any]:
    mixer = attention(expect(config.encoder, Stack, "encoder").blocks[0], "encoder")
    scaled = isinstance(expect(config.source, Tokens, "source").scale, SqrtWidth)
    kind = {"attention_type": "original_full", "use_bias": mixer.bias, "rescale_embeddings": scaled}
    return bert.write(config) | kind


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield from bert.body_rules(config, "bert")
    yield from HEADS.rules(config)


BIG_BIRD = encoder_family(
    "big_bird",
    "BigBird",
    "bert",
    read,
    write,
    rules,
    heads={
        **{name: head for name, head in classes("BigBird").items() if head != "span"},  # which has further layers
        "BigBirdForPreTraining": "masked_lm",
    },
    unused=(r"bert\.pooler\..*", r"cls\..*"),
)
