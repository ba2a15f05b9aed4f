"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with the projections of a layer in one matrix."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import LinearScaling, ModelConfig, NoScaling, Rotary, Stack
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.llama import Defaults
from anyformer.interop.family import Family, Framing, expect
from anyformer.interop.weight_rules import AnyRule, Rule

DEFAULTS = Defaults(
    width=3072, ff=8192, vocab=32_064, length=4096, eps=1e-5, eos=32_000, pad=32_000, window=0, fraction=1.0
)


def read(fields: Fields) -> ModelConfig:
    fields.silent("embd_pdrop", "attention_bias")  # not used by `transformers`
    fields.silent("original_max_position_embeddings")  # of a scaling that says it, too
    found = llama.read(DEFAULTS, fields)
    rotary = expect(expect(found.decoder, Stack, "decoder").position, Rotary, "decoder.position")
    if not isinstance(rotary.scaling, (NoScaling, LinearScaling)):  # `transformers` reads yarn as longrope
        fields.refuse("rope_parameters", "must be of rope_type default or linear: of phi3, others are not supported")
    drop = fields("resid_pdrop", 0.0)
    return _dropping(found, drop)


def _dropping(config: ModelConfig, drop: float) -> ModelConfig:
    """Set the dropout after sublayers."""
    stack = expect(config.decoder, Stack, "decoder")
    parts = {"prefix": stack.prefix, "blocks": stack.blocks}
    changes = {key: tuple(b.model_copy(update={"dropout": drop}) for b in blocks) for key, blocks in parts.items()}
    return config.model_copy(update={"decoder": stack.model_copy(update=changes)})


def write(config: ModelConfig) -> dict[str, Any]:
    return llama.write(DEFAULTS, config) | {"resid_pdrop": expect(config.decoder, Stack, "decoder").blocks[0].dropout}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    yield Rule("target.table", "model.embed_tokens")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.mixer.inner.qkv", f"{theirs}.self_attn.qkv_proj")
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.o_proj")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield Rule(f"{ours}.feedforward.inner.gate_up", f"{theirs}.mlp.gate_up_proj")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.down_proj")
    yield from llama.end_rules(config)


PHI3 = Family(
    kind="phi3",
    shape="decoder",
    heads={"Phi3ForCausalLM": "lm", "Phi3Model": "body"},
    text=Framing(before=("bos",)),
    prefix="model.",
    buffers=llama.BUFFERS,
    read=read,
    write=write,
    rules=rules,
)
