"""GPT-NeoX (Black et al. 2022) and Pythia: attention and feed-forward side by side, a part of each head rotary."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Attention, Block, LayerNorm, ModelConfig, Parallel, Plain, Projected, Sequential
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.family import Family, attention
from anyformer.interop.weight_rules import AnyRule, Conversion, Interleaved, Rule

ENDS = Ends(vocab=50_432, tied=False, bos=0, eos=2)


def read(fields: Fields) -> ModelConfig:
    fields.must("is_decoder", False, True)
    fields.silent("classifier_dropout")
    drop, bias = fields("hidden_dropout", 0.0), fields("attention_bias", True)
    norm = LayerNorm(eps=fields("layer_norm_eps", 1e-5))
    mixer = Attention(
        heads=fields("num_attention_heads", 64),
        bias=bias,
        output=Projected(bias=bias),
        dropout=fields("attention_dropout", 0.0),
    )
    block = Block(
        mixer=mixer,
        feedforward=Plain(
            width=fields("intermediate_size", 24_576), activation=fields.activation("hidden_act", "gelu")
        ),
        norm=norm,
        order=Parallel() if fields("use_parallel_residual", True) else Sequential(),
        dropout=drop,
    )
    fields.alias("rotary_emb_base", "rope_theta")  # names in older files
    fields.alias("rotary_pct", "partial_rotary_factor")
    position = fields.rotary(10_000.0, 0.25)
    layers = [block] * fields.depth("num_hidden_layers", 44)
    return build_decoder(fields, fields("hidden_size", 6144), layers, position, ENDS, tokens={"dropout": drop})


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    return {
        **parts.fields(),
        **parts.rotary_fields(2048, fraction=True),
        "layer_norm_eps": parts.eps,
        "use_parallel_residual": parts.block.order == Parallel(),
        "attention_bias": parts.mixer.bias,
        "hidden_dropout": parts.block.dropout,
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    turns = Interleaved(attention(config.decoder.blocks[0]).heads)
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"gpt_neox.layers.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from fused_rules(ours, theirs, "attention", turns)
    yield from end_rules(config, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")


def fused_rules(ours: str, theirs: str, mixer: str, conversion: Conversion) -> Iterator[AnyRule]:
    """Yield the linear layers of a block by their Megatron names, which BLOOM and Falcon also use."""
    yield Rule(f"{ours}.mixer.inner.qkv", f"{theirs}.{mixer}.query_key_value", conversion=conversion)
    yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.{mixer}.dense")
    yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.dense_h_to_4h")
    yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.dense_4h_to_h")


NEOX = Family(
    kind="gpt_neox",
    shape="decoder",
    heads={"GPTNeoXForCausalLM": "lm", "GPTNeoXModel": "body"},
    prefix="gpt_neox.",
    buffers=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    older=((r"^lm_head\.", "embed_out."),),
    read=read,
    write=write,
    rules=rules,
)
