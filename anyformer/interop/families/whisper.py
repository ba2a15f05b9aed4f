"""Whisper (Radford et al. 2022): an encoder of log-mel frames and a decoder of text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyformer import config as spec
from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.bart import side_fields
from anyformer.interop.family import Family, expect
from anyformer.interop.weight_rules import Alias, AnyRule, ConstantTensor, Rule, StackedRows

PLACES = 1500  # default positions of the encoder
WAVES = spec.Sinusoidal(layout="halves", closed=True)


def read(fields: Fields) -> ModelConfig:
    fields.must("tie_word_embeddings", True)
    fields.must("use_weighted_layer_sum", False)
    fields.must("is_decoder", False)
    fields.silent("scale_embedding")  # the published program computes that factor and does not use it
    fields.silent("encoder_layerdrop", "decoder_layerdrop", "init_std", "classifier_proj_size", "median_filter_width")
    fields.silent("apply_spec_augment", *(f"mask_{axis}_{what}" for axis in AXES for what in MASKS))
    vocab, drop = fields("vocab_size"), fields("dropout")
    return ModelConfig(
        width=fields("d_model"),
        source=spec.Audio(mels=fields("num_mel_bins"), dropout=drop),
        target=spec.Tokens(vocab=vocab, dropout=drop),
        encoder=_stack(fields, "encoder"),
        decoder=_stack(fields, "decoder"),
        head=spec.LM(),
        tie="output",
        special=fields.special(vocab, start=fields.default("decoder_start_token_id")),
        context=fields("max_source_positions"),
    )


AXES, MASKS = ("time", "feature"), ("prob", "length", "min_masks")  # of SpecAugment, in training


def _stack(fields: Fields, side: spec.Side) -> spec.Stack:
    family = side_fields("whisper", side)
    block = family.block(fields, bias=True)
    if side == "decoder":
        block = block.model_copy(update={"cross": block.mixer})
    return spec.Stack(
        depth=family.read_depth(fields),
        blocks=(block,),
        position=WAVES if side == "encoder" else spec.Learned(length=fields("max_target_positions")),
        final_norm=spec.LayerNorm(),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    sounds, tokens = expect(config.source, spec.Audio, "source"), expect(config.target, spec.Tokens, "target")
    if sounds.rate != spec.Audio().rate:  # a fact of preprocessor_config.json, not of config.json
        raise ConfigError(
            [Fault("source.rate", f"= {sounds.rate}: Whisper reads {spec.Audio().rate} samples per second")]
        )
    decoder = expect(config.decoder, spec.Stack, "decoder")
    found: dict[str, Any] = {
        "vocab_size": tokens.rows,
        "num_mel_bins": sounds.mels,
        "max_source_positions": config.context or PLACES,
        "max_target_positions": expect(decoder.position, spec.Learned, "decoder.position").length,
    }
    for side, stack in config.stacks.items():
        found |= side_fields("whisper", side).written(stack, config.width, side)
    return found


@dataclass(frozen=True)
class WithoutKeys:
    """Biases of queries and values, or of values alone: one of keys adds the same to all scores of a query, which
    softmax does not see. It is zero here, and left out there."""

    width: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        *q, v = parts
        return torch.cat([*q, torch.zeros_like(v), v])

    def part(self, whole: Tensor) -> list[Tensor]:
        *q, _, v = whole.split(self.width)
        return [*q, v]


def rules(config: ModelConfig) -> Iterator[AnyRule]:
    tokens = "model.decoder.embed_tokens.weight"
    yield Rule("target.table.weight", tokens)
    yield Alias("proj_out.weight", of=tokens)
    for i in range(2):
        yield Rule(f"source.sound.convolutions.{i}", f"model.encoder.conv{i + 1}")
    yield ConstantTensor("model.encoder.embed_positions.weight", (config.context or PLACES, config.width), waves)
    yield Rule("decoder.embedder.tables.positions", "model.decoder.embed_positions.weight")
    for side, stack in config.stacks.items():
        for i in range(stack.depth):
            yield from _layer(f"{side}.blocks.{i}", f"model.{side}.layers.{i}", config.width)
        yield Rule(f"{side}.final_norm", f"model.{side}.layer_norm")


def _layer(ours: str, theirs: str, d: int) -> Iterator[AnyRule]:
    for part, theirs_part, joined in (("mixer", "self_attn", "qkv"), ("cross", "encoder_attn", "kv")):
        own, other = f"{ours}.{part}.inner", f"{theirs}.{theirs_part}"
        weights = [f"{other}.{name}_proj.weight" for name in joined]
        biases = [f"{other}.{name}_proj.bias" for name in joined if name != "k"]
        yield Rule(f"{own}.{joined}.weight", *weights, conversion=StackedRows((d,) * len(joined)))
        yield Rule(f"{own}.{joined}.bias", *biases, conversion=WithoutKeys(d))
        yield Rule(f"{own}.q", f"{other}.q_proj")
        yield Rule(f"{own}.out", f"{other}.out_proj")
        yield Rule(f"{ours}.{part}.norm_in", f"{other}_layer_norm")
    yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.fc1")
    yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.fc2")
    yield Rule(f"{ours}.feedforward.norm_in", f"{theirs}.final_layer_norm")


def waves(shape: Sequence[int]) -> Tensor:
    """Return the table of `WAVES`, computed as published, so that it is the same to the last bit."""
    length, width = shape
    steps = math.log(10_000) / max(width // 2 - 1, 1)
    angles = torch.arange(length)[:, None] * torch.exp(-steps * torch.arange(width // 2))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


WHISPER = Family(
    kind="whisper",
    shape="encoder-decoder",
    heads={"WhisperForConditionalGeneration": "lm"},
    prefix="model.",
    read=read,
    write=write,
    rules=rules,
)
