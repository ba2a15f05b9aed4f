"""ViT (Dosovitskiy et al. 2021): an encoder of the patches of an image."""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ConfigError, ModelConfig
from anyformer.interop.config_fields import Fields, name_of, shown
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import AnyRule, Reshaped, Rule


def read(fields: Fields) -> ModelConfig:
    fields.silent("encoder_stride", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    norm, drop = spec.LayerNorm(eps=fields("layer_norm_eps", 1e-12)), fields("hidden_dropout_prob", 0.0)
    width = fields("hidden_size", 768)
    mixer = spec.Attention(
        heads=fields("num_attention_heads", 12),
        bias=fields("qkv_bias", True),
        output=spec.Projected(bias=True),
        dropout=fields("attention_probs_dropout_prob", 0.0),
    )
    feedforward = spec.Plain(
        width=fields("intermediate_size", 3072), activation=fields.activation("hidden_act", "gelu")
    )
    block = spec.Block(mixer=mixer, feedforward=feedforward, norm=norm, dropout=drop)
    height, across = _sides(fields, "image_size", 224)
    patch, other = _sides(fields, "patch_size", 16)
    if patch != other:
        fields.refuse("patch_size", f"= [{patch}, {other}]: must be a square")
    patches = spec.Patches(
        image_height=height, image_width=across, patch=patch, channels=fields("num_channels", 3), dropout=drop
    )
    return ModelConfig(
        width=width,
        source=patches,
        encoder=spec.Stack(
            depth=fields.depth("num_hidden_layers", 12),
            blocks=(block,),
            position=spec.Learned(length=patches.length),
            final_norm=norm,
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
    block = stack.blocks[0]
    mixer = attention(block, "encoder")
    feedforward = expect(block.feedforward, spec.Plain, "encoder.blocks.0.feedforward")
    channels, height, width = patches.shape
    found: dict[str, Any] = {
        "image_size": height if height == width else [height, width],
        "patch_size": patches.patch,
        "num_channels": channels,
        "hidden_size": config.width,
        "num_hidden_layers": stack.depth,
        "num_attention_heads": mixer.heads,
        "intermediate_size": feedforward.hidden(config.width),
        "hidden_act": name_of(feedforward.activation),
        "layer_norm_eps": expect(block.norm, spec.LayerNorm, "encoder.blocks.0.norm").eps,
        "qkv_bias": mixer.bias,
        "hidden_dropout_prob": block.dropout,
        "attention_probs_dropout_prob": mixer.dropout,
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
