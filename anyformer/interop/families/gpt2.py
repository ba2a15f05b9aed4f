"""GPT-2 (Radford et al. 2019)."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    Attention,
    Block,
    InvSqrtKey,
    LayerNorm,
    Learned,
    ModelConfig,
    Normal,
    Plain,
    Projected,
    Unscaled,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.family import Family, expect
from anyformer.interop.weight_rules import AnyRule, Rule, Transposed

ENDS = Ends(vocab=50_257, tied=True, bos=50_256, eos=50_256, context=None)


def read(fields: Fields) -> ModelConfig:
    fields.must("add_cross_attention", False)
    fields.must("scale_attn_by_inverse_layer_idx", False)
    fields.silent("reorder_and_upcast_attn", "n_ctx", "summary_type", "summary_use_proj", "summary_activation")
    fields.silent("summary_proj_to_labels", "summary_first_dropout")
    norm = LayerNorm(eps=fields("layer_norm_epsilon", 1e-5))
    mixer = Attention(
        heads=fields("n_head", 12),
        bias=True,
        output=Projected(bias=True),
        scale=InvSqrtKey() if fields("scale_attn_weights", True) else Unscaled(),
        dropout=fields("attn_pdrop", 0.1),
    )
    feedforward = Plain(
        width=fields.maybe("n_inner", int), activation=fields.activation("activation_function", "gelu_new")
    )
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, dropout=fields("resid_pdrop", 0.1))
    position = Learned(length=fields("n_positions", 1024))
    layers, tokens = [block] * fields.depth("n_layer", 12), {"dropout": fields("embd_pdrop", 0.1)}
    found = build_decoder(fields, fields("n_embd", 768), layers, position, ENDS, tokens=tokens)
    return found.model_copy(update={"init": Normal(residual=True)})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    return {
        **parts.gpt_fields(),
        "n_positions": expect(parts.stack.position, Learned, "decoder.position").length,
        "scale_attn_weights": parts.mixer.scale == InvSqrtKey(),
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    yield from end_rules(config, "transformer.wte", "transformer.ln_f")
    yield Rule("decoder.embedder.tables.positions", "transformer.wpe.weight")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.ln_1")
        yield Rule(f"{ours}.mixer.inner.qkv", f"{theirs}.attn.c_attn", conversion=Transposed())
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attn.c_proj", conversion=Transposed())
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.ln_2")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.c_fc", conversion=Transposed())
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.c_proj", conversion=Transposed())


GPT2 = Family(
    kind="gpt2",
    shape="decoder",
    heads={"GPT2LMHeadModel": "lm", "GPT2Model": "body"},
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    read=read,
    write=write,
    rules=rules,
)
