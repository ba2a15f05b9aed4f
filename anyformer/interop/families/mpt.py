"""MPT (MosaicML 2023): ALiBi, and no biases at all."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import (
    Alibi,
    Attention,
    Block,
    ConfigError,
    Gelu,
    InvSqrtKey,
    LayerNorm,
    ModelConfig,
    Plain,
    Projected,
    Scale,
    Times,
)
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.family import Family
from anyformer.interop.weight_rules import AnyRule, Rule

ENDS = Ends(vocab=50_368, tied=True, context="max_seq_len")
LENGTH = 2048  # longest text by default


def read(fields: Fields) -> ModelConfig:
    fields.must("expansion_ratio", 4)
    # not used by `transformers`, which reads all files as models without biases and with ALiBi
    fields.silent("learned_pos_emb", "no_bias", "norm_type", "embedding_fraction", "init_device", "logit_scale")
    fields.silent("emb_pdrop", "resid_pdrop")
    inner = fields.table("attn_config", fields.maybe("attn_config", dict) or {})
    for name in ("attn_type", "attn_impl", "prefix_lm", "qk_ln", "attn_uses_sequence_id", "alibi", "alibi_bias_max"):
        inner.silent(name)  # neither
    inner.silent("model_type", "is_encoder_decoder", "problem_type")
    inner.must("clip_qkv", None)
    inner.must("attn_pdrop", 0)
    given = inner.maybe("softmax_scale", float)
    inner.close()
    if given is not None and given <= 0:
        raise ConfigError([inner.fault("softmax_scale", f"= {given}: must be above 0")])
    scale: Scale = InvSqrtKey() if given is None else Times(value=given)
    norm = LayerNorm(eps=fields("layer_norm_epsilon", 1e-5), bias=False)
    mixer = Attention(heads=fields("n_heads", 16), output=Projected(), scale=scale)
    block = Block(mixer=mixer, feedforward=Plain(activation=Gelu(), bias=False), norm=norm)
    layers = [block] * fields.depth("n_layers", 24)
    found = build_decoder(fields, fields("d_model", 2048), layers, Alibi(), ENDS)
    return found.model_copy(update={"context": found.context or LENGTH})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    scale = parts.mixer.scale
    return {
        "vocab_size": parts.tokens.rows,
        "d_model": config.width,
        "n_heads": parts.mixer.heads,
        "n_layers": parts.stack.depth,
        "max_seq_len": config.context or LENGTH,
        "layer_norm_epsilon": parts.eps,
        "attn_config": {"softmax_scale": scale.value if isinstance(scale, Times) else None},
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.blocks.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.norm_1")
        yield Rule(f"{ours}.mixer.inner.qkv", f"{theirs}.attn.Wqkv")
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attn.out_proj")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.norm_2")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.ffn.up_proj")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.ffn.down_proj")
    yield from end_rules(config, "transformer.wte", "transformer.norm_f")


MPT = Family(
    kind="mpt",
    shape="decoder",
    heads={"MptForCausalLM": "lm", "MptModel": "body"},
    prefix="transformer.",
    read=read,
    write=write,
    rules=rules,
)
