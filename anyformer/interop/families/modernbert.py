"""ModernBERT (Warner et al. 2024): norms first, rotary positions, gates; most layers see a window.

Its first attention has no norm, since the embeddings have one: that layer is two blocks here.
"""

from collections.abc import Iterator
from typing import Any

from anyformer import config as spec
from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.families.block_fields import LayerKinds
from anyformer.interop.families.encoder_parts import encoder_family, read_head
from anyformer.interop.family import expect, stack_of, tile_layers
from anyformer.interop.rotary_fields import FULL, NEAR, read_rotaries, write_rotaries
from anyformer.interop.weight_rules import Alias, AnyRule, Rule, block_rules

LAYER = {
    "mixer.norm_in": "attn_norm",
    "mixer.inner.qkv": "attn.Wqkv",
    "mixer.inner.out": "attn.Wo",
    "feedforward.norm_in": "mlp_norm",
    "feedforward.inner.gate_up": "mlp.Wi",
    "feedforward.inner.down": "mlp.Wo",
}
POOLS: dict[str, spec.Pool] = {"cls": "first", "mean": "mean"}


def read(fields: Fields) -> ModelConfig:
    fields.silent("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", "sparse_prediction")
    fields.silent("sparse_pred_ignore_index", "initializer_cutoff_factor", "embedding_size", "layer_norm_eps")
    fields.silent("position_embedding_type")  # of any value: positions are rotary
    depth, bias = fields.depth("num_hidden_layers"), fields("attention_bias")
    norm = spec.LayerNorm(eps=fields("norm_eps"), bias=fields("norm_bias"))
    full = spec.Attention(
        heads=fields("num_attention_heads"),
        bias=bias,
        output=spec.Projected(bias=bias),
        dropout=fields("attention_dropout"),
    )
    fields.must("rope_scaling")  # `transformers` applies it to all layers
    far, local = read_rotaries(fields, fields("global_rope_theta", 160_000.0), fields("local_rope_theta", 10_000.0))
    size = fields("local_attention") // 2
    near = full.model_copy(update={"pattern": spec.Window(before=size, after=size)})
    feedforward = spec.Gated(
        width=fields("intermediate_size"),
        activation=fields.activation("hidden_activation"),
        bias=fields("mlp_bias"),
        dropout=fields("mlp_dropout"),
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
    vocab, tied = fields("vocab_size"), fields("tie_word_embeddings")
    special = fields.special(vocab)
    return ModelConfig(
        width=fields("hidden_size"),
        source=spec.Tokens(vocab=vocab, norm=norm, dropout=fields("embedding_dropout"), pad=special.pad),
        encoder=spec.Stack(depth=depth + 1, prefix=prefix, blocks=blocks, position=far, final_norm=norm),
        head=_head(fields, norm),
        tie="output" if tied and fields.head == "masked_lm" else "none",
        special=special,
        context=fields.maybe("max_position_embeddings", int),
    )


def _head(fields: Fields, norm: spec.LayerNorm) -> spec.Head:
    through = spec.Transform(
        activation=fields.activation("classifier_activation"), norm=norm, bias=fields("classifier_bias")
    )
    labelled = {"transform": through, "dropout": fields("classifier_dropout")}
    masked = spec.MaskedLM(transform=through, bias=fields("decoder_bias"))
    pool = fields.one_of("classifier_pooling", POOLS)
    return read_head(fields, masked, spec.NoHead(), text=labelled | {"pool": pool}, tokens=labelled, span=labelled)


def write(config: ModelConfig) -> dict[str, Any]:
    stack = stack_of(config)
    bare, second, *rest = stack.unrolled() if stack.depth > 1 else stack.unrolled() * 2
    if not isinstance(second.mixer, spec.NoMixer):
        raise ConfigError([Fault("encoder.blocks.0.norm", "is there: modernbert's first attention has none")])
    network = expect(second.feedforward, spec.Gated, "encoder.blocks")
    norm = expect(second.norm, spec.LayerNorm, "encoder.blocks.norm")
    layers = LayerKinds.of((bare, *rest), "encoder")
    mixer = layers.mixers[0]
    ropes = {FULL: spec.Rotary(theta=160_000.0), NEAR: spec.Rotary()} | layers.ropes(stack, "encoder")
    found: dict[str, Any] = {
        "vocab_size": expect(config.source, spec.Tokens, "source").rows,
        "hidden_size": config.width,
        "intermediate_size": network.hidden(config.width),
        "num_hidden_layers": stack.depth - 1,
        "num_attention_heads": mixer.heads,
        "hidden_activation": name_of(network.activation),
        "norm_eps": norm.eps,
        "norm_bias": norm.bias,
        "attention_bias": mixer.bias,
        "attention_dropout": mixer.dropout,
        "mlp_bias": network.bias,
        "mlp_dropout": network.dropout,
        "layer_types": layers.kinds,
        "local_attention": 2 * (layers.size or 65) - 2,
        "max_position_embeddings": config.context or 8192,
        "rope_parameters": write_rotaries(ropes, mixer.widths(config.width)[0]),
        "tie_word_embeddings": config.tie == "output" or not isinstance(config.head, spec.MaskedLM),
    }
    head = config.head
    transformed = spec.MaskedLM | spec.TokenLabels | spec.SpanBounds | spec.Classifier
    if isinstance(head, transformed) and isinstance(through := head.transform, spec.Transform):
        found |= {"classifier_activation": name_of(through.activation), "classifier_bias": through.bias}
    if isinstance(head, spec.MaskedLM):
        found["decoder_bias"] = head.bias
    if isinstance(head, spec.Classifier):
        found["classifier_pooling"] = "cls" if head.pool == "first" else head.pool
    return found


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield Rule("source.table", "model.embeddings.tok_embeddings")
    yield Rule("source.norm", "model.embeddings.norm")
    for i in range(stack_of(config).depth):  # the first two are one layer
        yield from block_rules(f"encoder.blocks.{i}", f"model.layers.{max(i - 1, 0)}", LAYER)
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
