"""ViT (Dosovitskiy et al. 2021): an encoder of the patches of an image."""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ConfigError, ModelConfig
from anyformer.interop.config_fields import Fields, name_of, shown
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.family import Family, attention, expect, stack_of
from anyformer.interop.weight_rules import AnyRule, Reshaped, Rule, layer_rules

FIELDS = BlockFields(kind="vit", attention_dropout="attention_probs_dropout_prob", dropout="hidden_dropout_prob")
LAYER = {
    "mixer.norm_in": "layernorm_before",
    "mixer.inner.qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "mixer.inner.out": "attention.output.dense",
    "feedforward.norm_in": "layernorm_after",
    "feedforward.inner.up": "intermediate.dense",
    "feedforward.inner.down": "output.dense",
}


def read(fields: Fields) -> ModelConfig:
    fields.silent("encoder_stride", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    mixer = {"bias": fields("qkv_bias"), "output": spec.Projected(bias=True)}
    block, width = FIELDS.block(fields, mixer=mixer), fields("hidden_size")
    height, across = _sides(fields, "image_size")
    patch, other = _sides(fields, "patch_size")
    if patch != other:
        fields.refuse("patch_size", f"= [{patch}, {other}]: must be a square")
    patches = spec.Patches(
        image_height=height, image_width=across, patch=patch, channels=fields("num_channels"), dropout=block.dropout
    )
    return ModelConfig(
        width=width,
        source=patches,
        encoder=spec.Stack(
            depth=FIELDS.read_depth(fields),
            blocks=(block,),
            position=spec.Learned(length=patches.length),
            final_norm=block.norm,
        ),
        head=_head(fields, width),
    )


def _sides(fields: Fields, field: str) -> tuple[int, int]:
    """Return height and width: one number for a square, two for a rectangle."""
    try:
        return (side := fields(field)), side
    except ConfigError:
        sides = fields(field, list[int]())
        if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
            what = f"= {shown(sides)}: must be one size, or height and width"
            raise ConfigError([fields.fault(field, what)]) from None
        height, width = sides
        return height, width


def _head(fields: Fields, width: int) -> spec.Head:
    fields.must("pooler_output_size", width)
    through = spec.Transform(activation=fields.activation("pooler_act"))
    if fields.head == "classifier":
        return spec.Classifier(labels=len(fields.labels()))
    return spec.Embedder(pool="first", transform=through) if fields.has("pooler.dense.weight") else spec.NoHead()


def write(config: ModelConfig) -> dict[str, Any]:
    stack, patches = stack_of(config), expect(config.source, spec.Patches, "source")
    channels, height, width = patches.shape
    found: dict[str, Any] = {
        "image_size": height if height == width else [height, width],
        "patch_size": patches.patch,
        "num_channels": channels,
        "qkv_bias": attention(stack.blocks[0], "encoder").bias,
        **FIELDS.written(stack, config.width, "encoder"),
    }
    if isinstance(config.head, spec.Embedder) and isinstance(config.head.transform, spec.Transform):
        found["pooler_act"] = name_of(config.head.transform.activation)
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    patches, d = expect(config.source, spec.Patches, "source"), config.width
    embeddings, length = "vit.embeddings", patches.length
    yield Rule(
        "source.class_token.weight", f"{embeddings}.cls_token", conversion=Reshaped(ours=(1, d), theirs=(1, 1, d))
    )
    yield Rule(
        "encoder.embedder.tables.positions",
        f"{embeddings}.position_embeddings",
        conversion=Reshaped(ours=(length, d), theirs=(1, length, d)),
    )
    square = (d, patches.channels, patches.patch, patches.patch)
    projection = f"{embeddings}.patch_embeddings.projection"
    yield Rule(
        "source.project.weight", f"{projection}.weight", conversion=Reshaped(ours=(d, patches.size), theirs=square)
    )
    yield Rule("source.project.bias", f"{projection}.bias")
    yield from layer_rules("encoder.blocks", "vit.encoder.layer", stack_of(config).depth, LAYER)
    yield Rule("encoder.final_norm", "vit.layernorm")
    yield Rule("head.transform.linear", "vit.pooler.dense")
    yield Rule("head.last.1", "classifier")


VIT = Family(
    kind="vit",
    shape="encoder",
    heads={"ViTForImageClassification": "classifier", "ViTModel": "body"},
    prefix="vit.",
    unused=(r"vit\.pooler\..*",),
    read=read,
    write=write,
    rules=rules,
)
