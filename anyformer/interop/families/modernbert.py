"""ModernBERT (Warner et al. 2024): norms first, rotary positions, gates; most layers see a window.

Its first attention has no norm, since the embeddings have one: that layer is two blocks here.
"""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ConfigError, Fault, ModelConfig, pattern_of, position_of
from anyformer.interop.config_fields import Fields, name_of, write_rotary
from anyformer.interop.families.encoder_parts import encoder_family, read_span
from anyformer.interop.families.llama import FULL, NEAR
from anyformer.interop.family import attention, expect, tile_layers
from anyformer.interop.weight_rules import Alias, AnyRule, Rule

POOLS: dict[str, spec.Pool] = {"cls": "first", "mean": "mean"}


def read(fields: Fields) -> ModelConfig:
    fields.silent("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", "sparse_prediction")
    fields.silent("sparse_pred_ignore_index", "initializer_cutoff_factor", "embedding_size", "layer_norm_eps")
    fields.silent("position_embedding_type")  # of any value: positions are rotary
    depth, bias = fields.depth("num_hidden_layers", 22), fields("attention_bias", False)
    norm = spec.LayerNorm(eps=fields("norm_eps", 1e-5), bias=fields("norm_bias", False))
    full = spec.Attention(
        heads=fields("num_attention_heads", 12),
        bias=bias,
        output=spec.Projected(bias=bias),
        dropout=fields("attention_dropout", 0.0),
    )
    fields.must("rope_scaling")  # `transformers` applies it to all layers
    far, local = fields.rotaries(fields("global_rope_theta", 160_000.0), fields("local_rope_theta", 10_000.0))
    size = fields("local_attention", 128) // 2
    near = full.model_copy(update={"pattern": spec.Window(before=size, after=size)})
    feedforward = spec.Gated(
        width=fields("intermediate_size", 1152),
        activation=fields.activation("hidden_activation", "gelu"),
        bias=fields("mlp_bias", False),
        dropout=fields("mlp_dropout", 0.0),
    )
    every = fields("global_attn_every_n_layers", 3)
    kinds = fields.layer_types(depth, [NEAR if i % every else FULL for i in range(depth)], (FULL, NEAR))
    if FULL in kinds:
        near = near.model_copy(update={"position": local})
    else:  # then what they have is the stack's
        far = local
    mixers = [near if kind == NEAR else full for kind in kinds]
    first, *rest = (spec.Block(mixer=mixer, feedforward=feedforward, norm=norm) for mixer in mixers)
    bare = first.model_copy(update={"feedforward": spec.NoFeedForward(), "norm": spec.NoNorm()})
    prefix, blocks = tile_layers([bare, first.model_copy(update={"mixer": spec.NoMixer()}), *rest])
    vocab = fields("vocab_size", 50_368)
    special = fields.special(vocab, pad=50_283, bos=50_281, eos=50_282)
    tied = fields("tie_word_embeddings", True)
    return ModelConfig(
        width=fields("hidden_size", 768),
        source=spec.Tokens(vocab=vocab, norm=norm, dropout=fields("embedding_dropout", 0.0), pad=special.pad),
        encoder=spec.Stack(depth=depth + 1, prefix=prefix, blocks=blocks, position=far, final_norm=norm),
        head=_head(fields, norm),
        tie="output" if tied and fields.head == "masked_lm" else "none",
        special=special,
        context=fields.maybe("max_position_embeddings", int),
    )


def _head(fields: Fields, norm: spec.LayerNorm) -> spec.Head:
    through = spec.Transform(
        activation=fields.activation("classifier_activation", "gelu"), norm=norm, bias=fields("classifier_bias", False)
    )
    bias, drop = fields("decoder_bias", True), fields("classifier_dropout", 0.0)
    pool = fields.one_of("classifier_pooling", POOLS, "cls")
    match fields.head:
        case "masked_lm":
            return spec.MaskedLM(transform=through, bias=bias)
        case "token_labels":
            return spec.TokenLabels(labels=len(fields.labels()), transform=through, dropout=drop)
        case "span":
            return read_span(fields).model_copy(update={"transform": through, "dropout": drop})
        case "classifier":
            return spec.Classifier(labels=len(fields.labels()), pool=pool, transform=through, dropout=drop)
        case _:
            return spec.NoHead()


def write(config: ModelConfig) -> dict[str, Any]:
    stack = expect(config.encoder, spec.Stack, "encoder")
    bare, second, *rest = stack.unrolled() if stack.depth > 1 else [*stack.unrolled() * 2]
    if not isinstance(second.mixer, spec.NoMixer):
        raise ConfigError([Fault("encoder.blocks.0.norm", "is there: modernbert's first attention has none")])
    mixers = [attention(block, "encoder") for block in (bare, *rest)]
    network = expect(second.feedforward, spec.Gated, "encoder.blocks")
    norm = expect(second.norm, spec.LayerNorm, "encoder.blocks.norm")
    patterns = [pattern_of(mixer, "encoder") for mixer in mixers]
    windows = [isinstance(pattern, spec.Window) for pattern in patterns]
    ropes = {
        near: expect(position_of(mixer, stack), spec.Rotary, "encoder.position")
        for near, mixer in zip(windows, mixers, strict=True)
    }
    key = mixers[0].widths(config.width)[0]
    size = max((pattern.before for pattern in patterns if isinstance(pattern, spec.Window)), default=64)
    found: dict[str, Any] = {
        "vocab_size": expect(config.source, spec.Tokens, "source").rows,
        "hidden_size": config.width,
        "intermediate_size": network.hidden(config.width),
        "num_hidden_layers": stack.depth - 1,
        "num_attention_heads": mixers[0].heads,
        "hidden_activation": name_of(network.activation),
        "norm_eps": norm.eps,
        "norm_bias": norm.bias,
        "attention_bias": mixers[0].bias,
        "attention_dropout": mixers[0].dropout,
        "mlp_bias": network.bias,
        "mlp_dropout": network.dropout,
        "layer_types": [NEAR if near else FULL for near in windows],
        "local_attention": 2 * size,
        "max_position_embeddings": config.context or 8192,
        "rope_parameters": {
            FULL: write_rotary(ropes.get(False, spec.Rotary(theta=160_000.0)), key),
            NEAR: write_rotary(ropes.get(True, spec.Rotary()), key),
        },
        "tie_word_embeddings": config.tie == "output" or not isinstance(config.head, spec.MaskedLM),
    }
    head = config.head
    through = (
        head.transform
        if isinstance(head, (spec.MaskedLM, spec.TokenLabels, spec.SpanBounds, spec.Classifier))
        else None
    )
    if isinstance(through, spec.Transform):
        found |= {"classifier_activation": name_of(through.activation), "classifier_bias": through.bias}
    if isinstance(head, spec.MaskedLM):
        found["decoder_bias"] = head.bias
    if isinstance(head, spec.Classifier):
        found["classifier_pooling"] = "cls" if head.pool == "first" else head.pool
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    assert config.encoder
    yield Rule("source.table", "model.embeddings.tok_embeddings")
    yield Rule("source.norm", "model.embeddings.norm")
    for i in range(config.encoder.depth):
        ours, theirs = f"encoder.blocks.{i}", f"model.layers.{max(i - 1, 0)}"
        yield Rule(f"{ours}.mixer.norm_in", f"{theirs}.attn_norm")
        yield Rule(f"{ours}.mixer.inner.qkv", f"{theirs}.attn.Wqkv")
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.attn.Wo")
        yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.mlp_norm")
        yield Rule(f"{ours}.feedforward.inner.gate_up", f"{theirs}.mlp.Wi")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.mlp.Wo")
    yield Rule("encoder.final_norm", "model.final_norm")
    yield Rule("head.transform.linear", "head.dense")
    yield Rule("head.transform.norm", "head.norm")
    yield Rule("head.table", "decoder.weight")
    yield Rule("head.bias", "decoder.bias")
    yield Rule("head.linear", "classifier")  # of tokens, or spans
    yield Rule("head.last.1", "classifier")  # of texts
    if config.tie == "output":
        yield Alias("decoder.weight", of="model.embeddings.tok_embeddings.weight")


MODERNBERT = encoder_family(
    "modernbert",
    "ModernBert",
    "model",
    read,
    write,
    rules,
    buffers=(),
    unused=(r"head\..*", r"decoder\..*"),
)
