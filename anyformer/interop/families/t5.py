"""T5 (Raffel et al. 2020), its version 1.1 with gates and an untied head, and mT5, which follows version 1.1."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from anyformer import config as spec
from anyformer.config import ModelConfig, position_of
from anyformer.interop.config_fields import ACTIVATIONS, Fields, name_of, shown
from anyformer.interop.family import Family, Framing, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, Rule, block_rules, split_names


def read(kind: str, fields: Fields) -> ModelConfig:
    fields.must("is_decoder", False)
    fields.silent("classifier_dropout", "n_positions")
    # version 1.0 scales and ties the output, 1.1 does neither
    scaled = kind == "t5" and fields("scale_decoder_outputs", fields("tie_word_embeddings", True))
    fields.silent("tie_word_embeddings")
    tied = scaled or not fields.has("lm_head.weight")
    drop, width = fields("dropout_rate"), fields("d_model")
    norm = spec.RMSNorm(eps=fields("layer_norm_epsilon"))
    mixer = spec.Attention(
        heads=fields("num_heads"),
        key_width=fields("d_kv"),
        scale=spec.Unscaled(),
        dropout=drop,
    )
    feedforward = _network(fields, drop)
    block = spec.Block(mixer=mixer, feedforward=feedforward, norm=norm, dropout=drop)
    position = spec.T5Bias(
        buckets=fields("relative_attention_num_buckets"),
        max_distance=fields("relative_attention_max_distance"),
    )
    encoder = spec.Stack(
        depth=fields.depth("num_layers"),
        blocks=(block,),
        position=position,
        final_norm=norm,
        dropout=drop,
    )
    reading = (block.model_copy(update={"cross": mixer}),)
    depth = fields.depth("num_decoder_layers", encoder.depth)
    vocab = fields("vocab_size")
    special = fields.special(vocab, start=0)
    tokens = spec.Tokens(vocab=vocab, dropout=drop)
    return ModelConfig(
        width=width,
        source=tokens,
        target=tokens,
        encoder=encoder,
        decoder=encoder.model_copy(update={"depth": depth, "blocks": reading}),
        head=spec.LM(scale=spec.InvSqrtWidth() if scaled else spec.Unscaled())
        if fields.head == "lm"
        else spec.NoHead(),
        tie="all" if tied and fields.head == "lm" else "inputs",
        init=spec.FanIn(),
        special=special,
    )


def _network(fields: Fields, dropout: float) -> spec.Plain | spec.Gated:
    """`feed_forward_proj` names the activation and the gate; `dense_act_fn` and `is_gated_act` override it."""
    proj, width = fields("feed_forward_proj"), fields("d_ff")
    gate, _, name = proj.rpartition("-")
    if name not in ACTIVATIONS or gate not in ("", "gated"):
        fields.refuse("feed_forward_proj", f"= {shown(proj)}: must be an activation, or 'gated-' and one")
        name = "relu"
    act = fields.activation("dense_act_fn", "gelu_new" if proj == "gated-gelu" else name)
    if fields("is_gated_act", bool(gate)):
        return spec.Gated(width=width, activation=act, dropout=dropout)
    return spec.Plain(width=width, activation=act, bias=False, dropout=dropout)


def write(kind: str, config: ModelConfig) -> dict[str, Any]:
    encoder, decoder = expect(config.encoder, spec.Stack, "encoder"), expect(config.decoder, spec.Stack, "decoder")
    tokens, block = expect(config.source, spec.Tokens, "source"), encoder.blocks[0]
    mixer = attention(block, "encoder")
    position = expect(position_of(mixer, encoder), spec.T5Bias, "encoder.position")
    network = block.feedforward
    if not isinstance(network, (spec.Plain, spec.Gated)):
        network = expect(network, spec.Gated, "encoder.blocks.0.feedforward")
    act = name_of(network.activation)
    scaled = not isinstance(config.head, spec.LM) or config.head.scale == spec.InvSqrtWidth()
    found = {
        "vocab_size": tokens.rows,
        "d_model": config.width,
        "d_kv": mixer.widths(config.width)[0],
        "d_ff": network.hidden(config.width),
        "num_layers": encoder.depth,
        "num_decoder_layers": decoder.depth,
        "num_heads": mixer.heads,
        "relative_attention_num_buckets": position.buckets,
        "relative_attention_max_distance": position.max_distance,
        "layer_norm_epsilon": expect(block.norm, spec.RMSNorm, "encoder.blocks.0.norm").eps,
        "feed_forward_proj": act if isinstance(network, spec.Plain) else f"gated-{act.replace('gelu_new', 'gelu')}",
        "dropout_rate": block.dropout,
        "tie_word_embeddings": scaled,
    }
    return found if kind == "mt5" else found | {"scale_decoder_outputs": scaled}


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    yield Rule("source.table", "shared")
    yield from _side(config, "encoder")
    yield from _side(config, "decoder")
    yield Rule("head.table", "lm_head.weight")
    for side in ("encoder", "decoder"):
        yield Alias(f"{side}.embed_tokens.weight", of="shared.weight")
    if config.tie == "all":
        yield Alias("lm_head.weight", of="shared.weight")


def _side(config: ModelConfig, side: spec.Side) -> Iterator[Rule]:
    first = f"{side}.block.0.layer.0.SelfAttention"
    yield Rule(f"{side}.schemes.0.tables.buckets", f"{first}.relative_attention_bias.weight")
    last = 1 if side == "encoder" else 2
    names = {
        "mixer.norm_in": "0.layer_norm",
        "mixer.inner.qkv": split_names("0.SelfAttention.{}"),
        "mixer.inner.out": "0.SelfAttention.o",
        "cross.norm_in": "1.layer_norm",
        "cross.inner.q": "1.EncDecAttention.q",
        "cross.inner.kv": split_names("1.EncDecAttention.{}", "kv"),
        "cross.inner.out": "1.EncDecAttention.o",
        "feedforward.norm_in": f"{last}.layer_norm",
        "feedforward.inner.up": f"{last}.DenseReluDense.wi",
        "feedforward.inner.gate_up": split_names(f"{last}.DenseReluDense.wi_{{}}", "01"),
        "feedforward.inner.down": f"{last}.DenseReluDense.wo",
    }
    for i in range(config.stacks[side].depth):
        yield from block_rules(f"{side}.blocks.{i}", f"{side}.block.{i}.layer", names)
    yield Rule(f"{side}.final_norm", f"{side}.final_layer_norm")


def _family(kind: str, *classes: str) -> Family:
    return Family(
        kind=kind,
        shape="encoder-decoder",
        heads={name: "body" if name.endswith("5Model") else "lm" for name in classes},
        text=Framing(after=("eos",)),
        buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        read=partial(read, kind),
        write=partial(write, kind),
        rules=rules,
    )


T5 = _family("t5", "T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model")
MT5 = _family("mt5", "MT5ForConditionalGeneration", "MT5Model")
