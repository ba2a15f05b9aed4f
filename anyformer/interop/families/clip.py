"""CLIP (Radford et al. 2021): a ViT and a causal text model, whose projected vectors are in one space."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.family import Family, expect
from anyformer.interop.transformers_fields import fields_of
from anyformer.interop.weight_rules import AnyRule, Reshaped, Rule

TEXT = BlockFields(width=512, depth=12, heads=8, ff=2048, activation="quick_gelu")
SEEN = replace(TEXT, width=768, heads=12, ff=3072)


def read(fields: Fields) -> ModelConfig:
    fields.silent("logit_scale_init_value", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    text, seen = _table(fields, "text_config"), _table(fields, "vision_config")
    for inner in (text, seen):
        for field in ("is_encoder_decoder", "is_decoder", "add_cross_attention"):
            inner.must(field, False)
        inner.must("pruned_heads", {})
        inner.silent("projection_dim", "tie_word_embeddings", "dropout")  # the outer one decides; the last is unused
    seen.silent("pad_token_id", "bos_token_id", "eos_token_id")
    width, vocab = text("hidden_size", TEXT.width), text("vocab_size", 49_408)
    patches = spec.Patches(
        image_height=seen("image_size", 224),
        patch=seen("patch_size", 32),
        channels=seen("num_channels", 3),
        bias=False,
        norm=spec.LayerNorm(eps=seen("layer_norm_eps", 1e-5)),
    )
    tower = spec.ImageTower(
        width=seen("hidden_size", SEEN.width), source=patches, encoder=_stack(SEEN, seen, patches.length)
    )
    found = ModelConfig(
        width=width,
        target=spec.Tokens(vocab=vocab),
        decoder=_stack(TEXT, text, text("max_position_embeddings", 77)),
        head=spec.Embedder(pool="last", projection=fields("projection_dim", 512), normalize=True, learned_scale=True),
        image_tower=tower,
        special=text.special(vocab, pad=1, bos=49_406, eos=49_407),
    )
    text.close()
    seen.close()
    return found


def _table(fields: Fields, name: str) -> Fields:
    """Return the fields of one of the two models; those of an older table with another name come first."""
    older = fields.maybe(f"{name}_dict", dict) or {}
    inner = fields.table(name, (fields.maybe(name, dict) or {}) | older)
    inner.known = fields_of("clip").fields
    return inner


def _stack(family: BlockFields, fields: Fields, length: int) -> spec.Stack:
    block = family.block(fields, bias=True)
    position = spec.Learned(length=length)
    return spec.Stack(depth=family.read_depth(fields), blocks=(block,), position=position, final_norm=block.norm)


def write(config: ModelConfig) -> dict[str, Any]:
    tower = expect(config.image_tower, spec.ImageTower, "image_tower")
    tokens, head = expect(config.target, spec.Tokens, "target"), expect(config.head, spec.Embedder, "head")
    stack = expect(config.decoder, spec.Stack, "decoder")
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
    stack = expect(config.decoder, spec.Stack, "decoder")
    tower = expect(config.image_tower, spec.ImageTower, "image_tower")
    yield Rule("target.table", "text_model.embeddings.token_embedding")
    yield Rule("decoder.embedder.tables.positions", "text_model.embeddings.position_embedding.weight")
    yield from _layer_rules("decoder", "text_model", stack.depth)
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
    yield from _layer_rules(f"{ours}.encoder", "vision_model", tower.encoder.depth)
    yield Rule(f"{ours}.encoder.final_norm", "vision_model.post_layernorm")
    yield Rule(f"{ours}.head.project", "visual_projection")


def _layer_rules(ours: str, theirs: str, depth: int) -> Iterator[Rule]:
    for i in range(depth):
        here, there = f"{ours}.blocks.{i}", f"{theirs}.encoder.layers.{i}"
        yield Rule(f"{here}.mixer.norm_in", f"{there}.layer_norm1")
        yield Rule(f"{here}.mixer.inner.qkv", *(f"{there}.self_attn.{part}_proj" for part in "qkv"))
        yield Rule(f"{here}.mixer.inner.out", f"{there}.self_attn.out_proj")
        yield Rule(f"{here}.feedforward.norm_in", f"{there}.layer_norm2")
        yield Rule(f"{here}.feedforward.inner.up", f"{there}.mlp.fc1")
        yield Rule(f"{here}.feedforward.inner.down", f"{there}.mlp.fc2")


CLIP = Family(
    kind="clip",
    shape="decoder",
    heads={"CLIPModel": "body"},
    buffers=(r"(text|vision)_model\.embeddings\.position_ids",),
    read=read,
    write=write,
    rules=rules,
)
