"""ViT (Dosovitskiy et al. 2021): an encoder of the patches of an image."""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ConfigError, ModelConfig
from anyformer.interop.config_fields import Fields, name_of, shown
from anyformer.interop.families.bert import NAMES
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import AnyRule, Reshaped, Rule

FIELDS = BlockFields(names=NAMES, width=768, depth=12, heads=12, ff=3072, activation="gelu", eps=1e-12)


def read(fields: Fields) -> ModelConfig:
    fields.silent("encoder_stride", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    mixer = {"bias": fields("qkv_bias", True), "output": spec.Projected(bias=True)}
    block, width = FIELDS.block(fields, mixer=mixer), fields("hidden_size", FIELDS.width)
    height, across = _sides(fields, "image_size", 224)
    patch, other = _sides(fields, "patch_size", 16)
    if patch != other:
        fields.refuse("patch_size", f"= [{patch}, {other}]: must be a square")
    patches = spec.Patches(
        image_height=height, image_width=across, patch=patch, channels=fields("num_channels", 3), dropout=block.dropout
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


def _sides(fields: Fields, field: str, default: int) -> tuple[int, int]:
    """Return height and width: one number for a square, two for a rectangle."""
    try:
        return (side := fields(field, default)), side
    except ConfigError:
        sides = fields(field, [default, default])
        if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
            what = f"= {shown(sides)}: must be one size, or height and width"
            raise ConfigError([fields.fault(field, what)]) from None
        height, width = sides
        return height, width


def _head(fields: Fields, width: int) -> spec.Head:
    fields.must("pooler_output_size", width)
    through = spec.Transform(activation=fields.activation("pooler_act", "tanh"))
    if fields.head == "classifier":
        return spec.Classifier(labels=len(fields.labels()))
    return spec.Embedder(pool="first", transform=through) if fields.has("pooler.dense.weight") else spec.NoHead()


def write(config: ModelConfig) -> dict[str, Any]:
    stack, patches = expect(config.encoder, spec.Stack, "encoder"), expect(config.source, spec.Patches, "source")
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
    stack = expect(config.encoder, spec.Stack, "encoder")
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
    for i in range(stack.depth):
        ours, theirs = f"encoder.blocks.{i}", f"vit.encoder.layer.{i}"
        parts = (f"{theirs}.attention.attention.{part}" for part in ("query", "key", "value"))
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.layernorm_before")
        yield Rule(f"{ours}.mixer.inner.qkv", *parts)
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attention.output.dense")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.layernorm_after")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.intermediate.dense")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.output.dense")
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
