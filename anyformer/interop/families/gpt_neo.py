"""GPT-Neo (Black et al. 2021): GPT-2 with unscaled scores and a local window in every second layer."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from anyformer.config import (
    LM,
    Attention,
    Block,
    ConfigError,
    LayerNorm,
    Learned,
    ModelConfig,
    NoHead,
    Normal,
    Plain,
    Projected,
    Stack,
    Tokens,
    Unscaled,
    Window,
    hidden_width,
    pattern_of,
)
from anyformer.interop.config_fields import Fields, name_of, shown
from anyformer.interop.family import Family, attention, expect, tile_layers
from anyformer.interop.weight_rules import Alias, AnyRule, Rule

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
    prefix, blocks = tile_layers([kinds[kind] for kind in _kinds(fields, depth)])
    tied, vocab = fields("tie_word_embeddings", True), fields("vocab_size", 50_257)
    position = Learned(length=fields("max_position_embeddings", 2048))
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab, dropout=fields("embed_dropout", 0.0)),
        decoder=Stack(depth=depth, prefix=prefix, blocks=blocks, position=position, final_norm=norm),
        head=LM() if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        init=Normal(),
        special=fields.special(vocab, bos=50_256, eos=50_256),
    )


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
    stack = expect(config.decoder, Stack, "decoder")
    tokens, layers = expect(config.target, Tokens, "target"), stack.unrolled()
    block, patterns = layers[0], [pattern_of(attention(layer), "decoder") for layer in layers]
    mixer, feedforward = attention(block), expect(block.feedforward, Plain, "decoder.blocks.0.feedforward")
    sizes = [pattern.before + 1 for pattern in patterns if isinstance(pattern, Window)]
    kinds = [NEAR if isinstance(pattern, Window) else FULL for pattern in patterns]
    return {
        "vocab_size": tokens.rows,
        "max_position_embeddings": expect(stack.position, Learned, "decoder.position").length,
        "hidden_size": config.width,
        "num_layers": stack.depth,
        "num_heads": mixer.heads,
        "attention_types": [[[kind], len([*run])] for kind, run in groupby(kinds)],
        "window_size": max(sizes, default=256),
        "intermediate_size": hidden_width(feedforward, config.width),
        "activation_function": name_of(feedforward.activation, first="gelu_new"),
        "layer_norm_epsilon": expect(block.norm, LayerNorm, "decoder.blocks.0.norm").eps,
        "resid_dropout": block.dropout,
        "embed_dropout": tokens.dropout,
        "attention_dropout": mixer.dropout,
        "tie_word_embeddings": config.tie == "output",
    }


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.decoder
    yield Rule("target.table", "transformer.wte")
    yield Rule("decoder.embedder.tables.positions", "transformer.wpe.weight")
    for i in range(config.decoder.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.ln_1")
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.attn.attention.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attn.attention.out_proj")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.ln_2")
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.mlp.c_fc")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.c_proj")
    yield Rule("decoder.final_norm", "transformer.ln_f")
    yield Rule("head.table", "lm_head.weight")
    if config.tie == "output":
        yield Alias("lm_head.weight", of="transformer.wte.weight")


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
