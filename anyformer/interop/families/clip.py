"""CLIP (Radford et al. 2021): a ViT and a causal text model, whose projected vectors are in one space."""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.family import Family, expect, stack_of
from anyformer.interop.transformers_fields import fields_of
from anyformer.interop.weight_rules import AnyRule, Reshaped, Rule, layer_rules, split_names

TEXT, SEEN = (BlockFields(kind=f"clip_{one}_model") for one in ("text", "vision"))
LAYER = {
    "mixer.norm_in": "layer_norm1",
    "mixer.inner.qkv": split_names("self_attn.{}_proj"),
    "mixer.inner.out": "self_attn.out_proj",
    "feedforward.norm_in": "layer_norm2",
    "feedforward.inner.up": "mlp.fc1",
    "feedforward.inner.down": "mlp.fc2",
}


def read(fields: Fields) -> ModelConfig:
    fields.silent("logit_scale_init_value", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    text, seen = _table(fields, "text_config", TEXT), _table(fields, "vision_config", SEEN)
    for inner in (text, seen):
        for field in ("is_encoder_decoder", "is_decoder", "add_cross_attention"):
            inner.must(field, False)
        inner.must("pruned_heads", {})
        inner.silent("projection_dim", "tie_word_embeddings", "dropout")  # the outer one decides; the last is unused
    seen.silent("pad_token_id", "bos_token_id", "eos_token_id")
    width, vocab = text("hidden_size"), text("vocab_size")
    patches = spec.Patches(
        image_height=seen("image_size"),
        patch=seen("patch_size"),
        channels=seen("num_channels"),
        bias=False,
        norm=spec.LayerNorm(eps=seen("layer_norm_eps")),
    )
    tower = spec.ImageTower(width=seen("hidden_size"), source=patches, encoder=_stack(SEEN, seen, patches.length))
    found = ModelConfig(
        width=width,
        target=spec.Tokens(vocab=vocab),
        decoder=_stack(TEXT, text, text("max_position_embeddings")),
        head=spec.Embedder(pool="last", projection=fields("projection_dim"), normalize=True, learned_scale=True),
        image_tower=tower,
        special=text.special(vocab),
    )
    text.close()
    seen.close()
    return found


def _table(fields: Fields, name: str, family: BlockFields) -> Fields:
    """Return the fields of one of the two models; those of an older table with another name come first."""
    older = fields.maybe(f"{name}_dict", dict) or {}
    inner = fields.table(name, (fields.maybe(name, dict) or {}) | older)
    inner.known = fields_of("clip").fields | fields_of(family.kind).fields
    return inner


def _stack(family: BlockFields, fields: Fields, length: int) -> spec.Stack:
    block = family.block(fields, bias=True)
    position = spec.Learned(length=length)
    return spec.Stack(depth=family.read_depth(fields), blocks=(block,), position=position, final_norm=block.norm)


def write(config: ModelConfig) -> dict[str, Any]:
    tower = expect(config.image_tower, spec.ImageTower, "image_tower")
    tokens, head = expect(config.target, spec.Tokens, "target"), expect(config.head, spec.Embedder, "head")
    stack = stack_of(config)
    width = head.values(config.width, 0)
    text = {
        "vocab_size": tokens.rows,
        "max_position_embeddings": expect(stack.position, spec.Learned, "decoder.position").length,
        "bos_token_id": config.special.bos,
        "eos_token_id": config.special.eos,
        "pad_token_id": config.special.pad,
        **TEXT.written(stack, config.width, "decoder"),
    }
    seen = {
        "image_size": tower.source.image_height,
        "patch_size": tower.source.patch,
        "num_channels": tower.source.channels,
        **SEEN.written(tower.encoder, tower.width, "image_tower.encoder"),
    }
    both = {"projection_dim": width}
    return {"text_config": text | both, "vision_config": seen | both, **both}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    tower = expect(config.image_tower, spec.ImageTower, "image_tower")
    yield Rule("target.table", "text_model.embeddings.token_embedding")
    yield Rule("decoder.embedder.tables.positions", "text_model.embeddings.position_embedding.weight")
    yield from layer_rules("decoder.blocks", "text_model.encoder.layers", stack_of(config).depth, LAYER)
    yield Rule("decoder.final_norm", "text_model.final_layer_norm")
    yield Rule("head.project", "text_projection")
    yield Rule("head.last.log_scale", "logit_scale", conversion=Reshaped(ours=(), theirs=()))
    ours, theirs, d, patches = "image_tower", "vision_model.embeddings", tower.width, tower.source
    square = (d, patches.channels, patches.patch, patches.patch)
    yield Rule(f"{ours}.source.class_token.weight", f"{theirs}.class_embedding", conversion=Reshaped((1, d), (d,)))
    yield Rule(
        f"{ours}.source.project.weight",
        f"{theirs}.patch_embedding.weight",
        conversion=Reshaped(ours=(d, patches.size), theirs=square),
    )
    yield Rule(f"{ours}.encoder.embedder.tables.positions", f"{theirs}.position_embedding.weight")
    yield Rule(f"{ours}.source.norm", "vision_model.pre_layrnorm")
    yield from layer_rules(f"{ours}.encoder.blocks", "vision_model.encoder.layers", tower.encoder.depth, LAYER)
    yield Rule(f"{ours}.encoder.final_norm", "vision_model.post_layernorm")
    yield Rule(f"{ours}.head.project", "visual_projection")


CLIP = Family(
    kind="clip",
    shape="decoder",
    heads={"CLIPModel": "body"},
    buffers=(r"(text|vision)_model\.embeddings\.position_ids",),
    read=read,
    write=write,
    rules=rules,
)
