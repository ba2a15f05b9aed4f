"""StableLM 3B and 2 (Bellagente et al. 2024): Llama with layer norms, a part of each head rotary."""

from collections.abc import Iterator
from typing import Any

from anyformer.config import Attention, Block, Gated, LayerNorm, ModelConfig, NoNorm, Parallel, Sequential
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import llama
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules, llama_like
from anyformer.interop.family import attention
from anyformer.interop.weight_rules import AnyRule, Rows, Rule

ENDS = Ends(vocab=50_304, tied=False, bos=0, eos=0)


def read(fields: Fields) -> ModelConfig:
    fields.must("hidden_dropout", 0.0)  # of feed-forwards alone
    width, heads = fields("hidden_size", 2560), fields("num_attention_heads", 32)
    fields.must("head_dim", width // heads)
    norm, normed = LayerNorm(eps=fields("layer_norm_eps", 1e-5)), fields("qk_layernorm", False)
    mixer = Attention(
        heads=heads,
        kv_heads=fields("num_key_value_heads", 32),
        bias=fields("use_qkv_bias", False),
        qk_norm=LayerNorm(eps=norm.eps, bias=False) if normed else NoNorm(),
        qk_norm_over="each_head" if normed else "head",
        dropout=fields("attention_dropout", 0.0),
    )
    feedforward = Gated(width=fields("intermediate_size", 6912), activation=fields.activation("hidden_act", "silu"))
    order = Parallel(shared_norm=True) if fields("use_parallel_residual", False) else Sequential()
    block = Block(mixer=mixer, feedforward=feedforward, norm=norm, order=order)
    layers = [block] * fields.depth("num_hidden_layers", 32)
    return build_decoder(fields, width, layers, fields.rotary(10_000.0, 0.25), ENDS)


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Gated)
    return {
        **parts.fields(),
        **parts.rotary_fields(4096, fraction=True),
        "num_key_value_heads": parts.mixer.groups,
        "layer_norm_eps": parts.eps,
        "use_qkv_bias": parts.mixer.bias,
        "qk_layernorm": isinstance(parts.mixer.qk_norm, LayerNorm),
        "use_parallel_residual": isinstance(parts.block.order, Parallel),
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    mixer = attention(config.decoder.blocks[0])
    key = mixer.widths(config.width)[0]
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"model.layers.{i}"
        yield Rule(f"{ours}.norm_in", f"{theirs}.input_layernorm")  # one for both
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.input_layernorm")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.o_proj")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.post_attention_layernorm")
        yield from llama.gated_rules(f"{ours}.feedforward.inner", f"{theirs}.mlp")
        for name, heads in (("q", mixer.heads), ("k", mixer.groups)):
            each = [f"{theirs}.self_attn.{name}_layernorm.norms.{n}.weight" for n in range(heads)]
            yield Rule(f"{ours}.mixer.inner.{name}_norm.weight", *each, conversion=Rows((key,) * heads))
    yield from end_rules(config)


STABLELM = llama_like("stablelm", "StableLm", read, write, rules)
