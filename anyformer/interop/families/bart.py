"""BART (Lewis et al. 2020) and its variants mBART, Marian, Pegasus, M2M-100 and NLLB.

They differ in the placement of norms and in their positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer import config as spec
from anyformer.config import ConfigError, ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.family import Family, Framing, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, ConstantTensor, Reshaped, Rule, layer_rules, split_names

LENGTH = 1024  # default number of positions
LABELS = 3  # default number of labels: BART was fine-tuned for inference
OFFSET = 2  # rows of a table of positions before the first


@dataclass(frozen=True)
class BartVariant:
    """Properties of a variant."""

    kind: str
    first: bool  # pre-norm, with a final norm
    positions: Literal["learned", "halves", "fairseq"] = "learned"
    stored: bool = False  # sinusoidal positions are in the file

    @property
    def table(self) -> bool:
        """True if positions are learned and followed by a norm."""
        return self.positions == "learned"

    @property
    def shift(self) -> bool:
        """True if the logits have a bias."""
        return self.positions != "fairseq"


LAYER: dict[str, str | tuple[str, ...]] = {
    "mixer.inner.qkv": split_names("self_attn.{}_proj"),
    "mixer.inner.out": "self_attn.out_proj",
    "cross.inner.q": "encoder_attn.q_proj",
    "cross.inner.kv": split_names("encoder_attn.{}_proj", "kv"),
    "cross.inner.out": "encoder_attn.out_proj",
    "feedforward.inner.up": "fc1",
    "feedforward.inner.down": "fc2",
}
for norm in ("norm_in", "norm_sum"):
    LAYER |= {f"mixer.{norm}": "self_attn_layer_norm", f"cross.{norm}": "encoder_attn_layer_norm"}
    LAYER[f"feedforward.{norm}"] = "final_layer_norm"


def read(variant: BartVariant, fields: Fields) -> ModelConfig:
    fields.must("is_decoder", False)
    fields.must("tie_word_embeddings", True)
    fields.must("add_final_layer_norm", variant.first)
    fields.must("normalize_before", variant.first)
    fields.must("add_bias_logits", False)
    fields.must("normalize_embedding", variant.table)
    fields.must("static_position_embeddings", not variant.table)
    fields.silent("classif_dropout", "init_std", "encoder_layerdrop", "decoder_layerdrop")
    fields.silent("extra_pos_embeddings")
    length, vocab = fields("max_position_embeddings"), fields("vocab_size")
    special = fields.special(vocab, start=fields.default("decoder_start_token_id"))
    if variant.positions == "halves":
        fields.must("share_encoder_decoder_embeddings", True)
        fields.must("decoder_vocab_size", vocab)
    if special.pad is None:
        raise ConfigError([fields.fault("pad_token_id", "is missing")])
    if variant.positions == "fairseq" and special.start == special.pad:
        what = f"= {special.start} is pad_token_id: transformers gives a first token that is padding no position, "
        what += "and counts those after it differently with and without a cache; "
        what += f"set it to eos_token_id, {special.eos}, as published"
        fields.refuse("decoder_start_token_id", what)
    position: dict[str, spec.Position] = {
        "learned": spec.Learned(length=length, offset=OFFSET),
        "halves": spec.Sinusoidal(layout="halves"),
        "fairseq": spec.Sinusoidal(layout="halves", closed=True, offset=special.pad + 1),
    }
    tokens = spec.Tokens(
        vocab=vocab,
        scale=spec.SqrtWidth() if fields("scale_embedding") else spec.Unscaled(),
        norm=spec.LayerNorm() if variant.table else spec.NoNorm(),
        dropout=fields("dropout"),
        pad=special.pad,
    )
    encoder, decoder = (_stack(variant, fields, side, position[variant.positions]) for side in ("encoder", "decoder"))
    return ModelConfig(
        width=fields("d_model"),
        source=tokens,
        target=tokens,
        encoder=encoder,
        decoder=decoder,
        head=_head(variant, fields),
        tie="all" if fields.head == "lm" else "inputs",
        special=special,
        context=None if variant.table else length,
    )


def _head(variant: BartVariant, fields: Fields) -> spec.Head:
    """Return the head, which reads the decoder: it is given the text of the encoder, one token later."""
    drop = fields("classifier_dropout", 0.0)
    match fields.head:
        case "lm":
            return spec.LM(bias=variant.shift and fields.has("final_logits_bias"))
        case "classifier":
            through = spec.Transform(activation=spec.Tanh())
            return spec.Classifier(labels=len(fields.labels(LABELS)), pool="last", transform=through, dropout=drop)
        case "span":
            return spec.SpanBounds()
        case _:
            return spec.NoHead()


def side_fields(kind: str, side: spec.Side) -> BlockFields:
    """Return the fields of one of two stacks, as in fairseq."""
    return BlockFields(
        kind=kind,
        width="d_model",
        depth=f"{side}_layers",
        heads=f"{side}_attention_heads",
        ff=f"{side}_ffn_dim",
        activation="activation_function",
        network_dropout="activation_dropout",
        eps=None,
        dropout="dropout",
    )


def _stack(variant: BartVariant, fields: Fields, side: spec.Side, position: spec.Position) -> spec.Stack:
    family, biased = side_fields(variant.kind, side), fields.has("layers.0.self_attn.q_proj.bias")  # or they are zero
    block = family.block(fields, bias=biased, placement="pre" if variant.first else "post")
    if side == "decoder":
        block = block.model_copy(update={"cross": block.mixer})
    final = spec.LayerNorm() if variant.first else spec.NoNorm()
    return spec.Stack(depth=family.read_depth(fields), blocks=(block,), position=position, final_norm=final)


def write(variant: BartVariant, config: ModelConfig) -> dict[str, Any]:
    tokens = expect(config.source, spec.Tokens, "source")
    found: dict[str, Any] = {
        "vocab_size": tokens.rows,
        "scale_embedding": tokens.scale == spec.SqrtWidth(),
    }
    if isinstance(config.head, spec.Classifier):
        found["classifier_dropout"] = config.head.dropout
    for side, stack in config.stacks.items():
        length = (
            expect(stack.position, spec.Learned, f"{side}.position").length
            if variant.table
            else config.context or LENGTH
        )
        found |= side_fields(variant.kind, side).written(stack, config.width, side)
        found["max_position_embeddings"] = length
    return found


def rules(variant: BartVariant, config: ModelConfig) -> Iterator[AnyRule]:
    yield Rule("source.table", "model.shared")
    yield from _side(config, "encoder", "source")
    yield from _side(config, "decoder", "target")
    for side in ("encoder", "decoder"):
        if variant.stored or (variant.positions == "halves" and isinstance(config.head, spec.NoHead)):  # MarianModel
            yield ConstantTensor(
                f"model.{side}.embed_positions.weight", (config.context or LENGTH, config.width), _waves
            )
        yield Alias(f"model.{side}.embed_tokens.weight", of="model.shared.weight")
    yield Rule("head.transform.linear", "classification_head.dense")
    yield Rule("head.last.1", "classification_head.out_proj")
    yield Rule("head.linear", "qa_outputs")
    if not isinstance(config.head, spec.LM):
        return
    yield Alias("lm_head.weight", of="model.shared.weight")
    shape = (1, config.vocab)
    if config.head.bias:
        yield Rule("head.bias", "final_logits_bias", conversion=Reshaped(ours=(config.vocab,), theirs=shape))
    elif variant.shift:
        yield ConstantTensor("final_logits_bias", shape)


def _waves(shape: tuple[int, int]) -> Tensor:
    """Return the table of `Sinusoidal(layout="halves")`."""
    length, width = shape
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.arange(length)[:, None] / 10_000.0**exponents
    return torch.cat((angles.sin(), angles.cos()[:, : width // 2]), dim=-1).float()


def _side(config: ModelConfig, side: spec.Side, read: str) -> Iterator[AnyRule]:
    body = f"model.{side}"
    yield Rule(f"{side}.embedder.tables.positions", f"{body}.embed_positions.weight")
    yield Rule(f"{read}.norm", f"{body}.layernorm_embedding")
    yield from layer_rules(f"{side}.blocks", f"{body}.layers", config.stacks[side].depth, LAYER)
    if not attention(config.stacks[side].blocks[0], side).bias:
        mixers = ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]
        parts = ("q_proj", "k_proj", "v_proj", "out_proj")
        for i, mixer, part in product(range(config.stacks[side].depth), mixers, parts):
            yield ConstantTensor(f"{body}.layers.{i}.{mixer}.{part}.bias", (config.width,))
    yield Rule(f"{side}.final_norm", f"{body}.layer_norm")


def _family(variant: BartVariant, text: Framing, heads: dict[str, str]) -> Family:
    waves = variant.positions != "learned" and not variant.stored
    return Family(
        kind=variant.kind,
        shape="encoder-decoder",
        heads=heads,
        text=text,
        prefix="model.",
        buffers=(r"model\.(en|de)coder\.embed_positions\.weights?",) if waves else (),
        read=partial(read, variant),
        write=partial(write, variant),
        rules=partial(rules, variant),
    )


def _heads(title: str, written: str = "ForConditionalGeneration", **more: str) -> dict[str, str]:
    return {f"{title}{written}": "lm", **more, f"{title}Model": "body"}


FRAMED, ENDED = Framing(before=("bos",), after=("eos",)), Framing(after=("eos",))
LABELLED = {"BartForSequenceClassification": "classifier", "BartForQuestionAnswering": "span"}
BART = _family(BartVariant("bart", first=False), FRAMED, _heads("Bart", **LABELLED))
MBART = _family(BartVariant("mbart", first=True), FRAMED, _heads("MBart"))
MARIAN = _family(BartVariant("marian", first=False, positions="halves"), ENDED, _heads("Marian", "MTModel"))
PEGASUS = _family(BartVariant("pegasus", first=True, positions="halves", stored=True), ENDED, _heads("Pegasus"))
M2M100 = _family(BartVariant("m2m_100", first=True, positions="fairseq"), ENDED, _heads("M2M100"))
