"""GPT-Neo (Black et al. 2021): GPT-2 with unscaled scores and a local window in every second layer."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from anyformer.config import (
    Attention,
    Block,
    ConfigError,
    LayerNorm,
    Learned,
    ModelConfig,
    Normal,
    Plain,
    Projected,
    Unscaled,
    Window,
    pattern_of,
)
from anyformer.interop.config_fields import Fields, name_of, shown
from anyformer.interop.families.decoder_frame import DecoderParts, Ends, build_decoder, end_rules
from anyformer.interop.family import Family, attention, expect
from anyformer.interop.weight_rules import AnyRule, Rule

ENDS = Ends(vocab=50_257, tied=True, bos=50_256, eos=50_256, context=None)
FULL, NEAR = "global", "local"


def read(fields: Fields) -> ModelConfig:
    fields.silent("classifier_dropout")
    depth, width = fields.depth("num_layers", 24), fields("hidden_size", 2048)
    norm, window = LayerNorm(eps=fields("layer_norm_epsilon", 1e-5)), fields("window_size", 256)
    full = Attention(
        heads=fields("num_heads", 16),
        output=Projected(bias=True),
        scale=Unscaled(),
        dropout=fields("attention_dropout", 0.0),
    )
    near = full.model_copy(update={"pattern": Window(before=window - 1, after=0)})
    act = fields.activation("activation_function", "gelu_new")
    feedforward, drop = (
        Plain(width=fields("intermediate_size", 4 * width), activation=act),
        fields("resid_dropout", 0.0),
    )
    block = Block(mixer=full, feedforward=feedforward, norm=norm, dropout=drop)
    kinds = {FULL: block, NEAR: block.model_copy(update={"mixer": near})}
    layers, tokens = [kinds[kind] for kind in _kinds(fields, depth)], {"dropout": fields("embed_dropout", 0.0)}
    position = Learned(length=fields("max_position_embeddings", 2048))
    found = build_decoder(fields, width, layers, position, ENDS, tokens=tokens)
    return found.model_copy(update={"init": Normal()})


def _kinds(fields: Fields, depth: int) -> list[str]:
    """Return the kind of each layer, which the file says twice: in short and layer by layer."""
    short = fields.maybe("attention_types", list) or [[[FULL, NEAR], 12]]
    try:
        found = [kind for kinds, times in short for _ in range(times) for kind in kinds][: depth + 1]
    except (TypeError, ValueError):
        found = []
    if len(found) != depth or not {*found} <= {FULL, NEAR}:
        what = f"must be {FULL} and {NEAR} layers with their numbers, {depth} in all"
        raise ConfigError([fields.fault("attention_types", f"= {shown(short)}: {what}")])
    fields.must("attention_layers", found)
    return found


def write(config: ModelConfig) -> dict[str, Any]:
    parts = DecoderParts.of(config, Plain)
    patterns = [pattern_of(attention(layer), "decoder") for layer in parts.stack.unrolled()]
    sizes = [pattern.before + 1 for pattern in patterns if isinstance(pattern, Window)]
    kinds = [NEAR if isinstance(pattern, Window) else FULL for pattern in patterns]
    return {
        "vocab_size": parts.tokens.rows,
        "max_position_embeddings": expect(parts.stack.position, Learned, "decoder.position").length,
        "hidden_size": config.width,
        "num_layers": parts.stack.depth,
        "num_heads": parts.mixer.heads,
        "attention_types": [[[kind], len([*run])] for kind, run in groupby(kinds)],
        "window_size": max(sizes, default=256),
        "intermediate_size": parts.ff,
        "activation_function": name_of(parts.feedforward.activation, first="gelu_new"),
        "layer_norm_epsilon": parts.eps,
        "resid_dropout": parts.block.dropout,
        "embed_dropout": parts.tokens.dropout,
        "attention_dropout": parts.mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    yield Rule("decoder.embedder.tables.positions", "transformer.wpe.weight")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.ln_1")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.attn.attention.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attn.attention.out_proj")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.ln_2")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.c_fc")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.c_proj")
    yield from end_rules(config, "transformer.wte", "transformer.ln_f")


GPT_NEO = Family(
    kind="gpt_neo",
    shape="decoder",
    heads={"GPTNeoForCausalLM": "lm", "GPTNeoModel": "body"},
    prefix="transformer.",
    buffers=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
    read=read,
    write=write,
    rules=rules,
)
