"""BART (Lewis et al. 2020) and its variants mBART, Marian, Pegasus, M2M-100 and NLLB.

They differ in the placement of norms and in their positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer import config as spec
from anyformer.config import ConfigError, ModelConfig
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import BlockFields, FieldNames
from anyformer.interop.family import Family, Framing, attention, expect
from anyformer.interop.weight_rules import Alias, AnyRule, ConstantTensor, Reshaped, Rule

LENGTH = 1024  # default number of positions
LABELS = 3  # default number of labels: BART was fine-tuned for inference
OFFSET = 2  # rows of a table of positions before the first


@dataclass(frozen=True)
class BartDefaults:
    """Properties of a variant, and its defaults for fields missing in config.json."""

    first: bool  # pre-norm, with a final norm
    positions: Literal["learned", "halves", "fairseq"] = "learned"
    vocab: int = 50_265
    activation: str = "gelu"
    scaled: bool = False
    attention_dropout: float = 0.0
    pad: int = 1
    bos: int | None = 0
    eos: int = 2
    start: int | None = None
    stored: bool = False  # sinusoidal positions are in the file

    @property
    def table(self) -> bool:
        """True if positions are learned and followed by a norm."""
        return self.positions == "learned"

    @property
    def shift(self) -> bool:
        """True if the logits have a bias."""
        return self.positions != "fairseq"


def read(defaults: BartDefaults, fields: Fields) -> ModelConfig:
    fields.must("is_decoder", False)
    fields.must("tie_word_embeddings", True)
    fields.must("add_final_layer_norm", defaults.first)
    fields.must("normalize_before", defaults.first)
    fields.must("add_bias_logits", False)
    fields.must("normalize_embedding", defaults.table)
    fields.must("static_position_embeddings", not defaults.table)
    fields.silent("classif_dropout", "init_std", "encoder_layerdrop", "decoder_layerdrop")
    fields.silent("extra_pos_embeddings")
    length, vocab = fields("max_position_embeddings", LENGTH), fields("vocab_size", defaults.vocab)
    special = fields.special(vocab, pad=defaults.pad, bos=defaults.bos, eos=defaults.eos, start=defaults.start)
    if defaults.positions == "halves":
        fields.must("share_encoder_decoder_embeddings", True)
        fields.must("decoder_vocab_size", vocab)
    if special.pad is None:
        raise ConfigError([fields.fault("pad_token_id", "is missing")])
    if defaults.positions == "fairseq" and special.start == special.pad:
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
        scale=spec.SqrtWidth() if fields("scale_embedding", defaults.scaled) else spec.Unscaled(),
        norm=spec.LayerNorm() if defaults.table else spec.NoNorm(),
        dropout=fields("dropout", 0.1),
        pad=special.pad,
    )
    encoder, decoder = (_stack(defaults, fields, side, position[defaults.positions]) for side in ("encoder", "decoder"))
    return ModelConfig(
        width=fields("d_model", 1024),
        source=tokens,
        target=tokens,
        encoder=encoder,
        decoder=decoder,
        head=_head(defaults, fields),
        tie="all" if fields.head == "lm" else "inputs",
        special=special,
        context=None if defaults.table else length,
    )


def _head(defaults: BartDefaults, fields: Fields) -> spec.Head:
    """Return the head, which reads the decoder: it is given the text of the encoder, one token later."""
    drop = fields("classifier_dropout", 0.0)
    match fields.head:
        case "lm":
            return spec.LM(bias=defaults.shift and fields.has("final_logits_bias"))
        case "classifier":
            through = spec.Transform(activation=spec.Tanh())
            return spec.Classifier(labels=len(fields.labels(LABELS)), pool="last", transform=through, dropout=drop)
        case "span":
            return spec.SpanBounds()
        case _:
            return spec.NoHead()


def side_names(side: spec.Side) -> FieldNames:
    """Return the names of the fields of one of two stacks, as in fairseq."""
    return FieldNames(
        width="d_model",
        depth=f"{side}_layers",
        heads=f"{side}_attention_heads",
        ff=f"{side}_ffn_dim",
        activation="activation_function",
        eps=None,
        dropout="dropout",
    )


def _blocks(defaults: BartDefaults, side: spec.Side) -> BlockFields:
    return BlockFields(
        names=side_names(side),
        width=1024,
        depth=12,
        heads=16,
        ff=4096,
        activation=defaults.activation,
        dropout=0.1,
        attention_dropout=defaults.attention_dropout,
    )


def _stack(defaults: BartDefaults, fields: Fields, side: spec.Side, position: spec.Position) -> spec.Stack:
    family, biased = _blocks(defaults, side), fields.has("layers.0.self_attn.q_proj.bias")  # or they are zero
    network, placement = {"dropout": fields("activation_dropout", 0.0)}, "pre" if defaults.first else "post"
    block = family.block(fields, bias=biased, feedforward=network, placement=placement)
    if side == "decoder":
        block = block.model_copy(update={"cross": block.mixer})
    final = spec.LayerNorm() if defaults.first else spec.NoNorm()
    return spec.Stack(depth=family.read_depth(fields), blocks=(block,), position=position, final_norm=final)


def write(defaults: BartDefaults, config: ModelConfig) -> dict[str, Any]:
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
            if defaults.table
            else config.context or LENGTH
        )
        network = expect(stack.blocks[0].feedforward, spec.Plain, f"{side}.blocks.0.feedforward")
        found |= _blocks(defaults, side).written(stack, config.width, side)
        found |= {"max_position_embeddings": length, "activation_dropout": network.dropout}
    return found


def rules(defaults: BartDefaults, config: ModelConfig) -> Iterator[AnyRule]:
    yield Rule("source.table", "model.shared")
    yield from _side(config, "encoder", "source")
    yield from _side(config, "decoder", "target")
    for side in ("encoder", "decoder"):
        if defaults.stored or (defaults.positions == "halves" and isinstance(config.head, spec.NoHead)):  # MarianModel
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
    elif defaults.shift:
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
    for i in range(config.stacks[side].depth):
        ours, theirs = f"{side}.blocks.{i}", f"{body}.layers.{i}"
        yield Rule(f"{ours}.mixer.inner.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
        yield Rule(f"{ours}.mixer.inner.out", f"{theirs}.self_attn.out_proj")
        yield Rule(f"{ours}.cross.inner.q", f"{theirs}.encoder_attn.q_proj")
        yield Rule(f"{ours}.cross.inner.kv", *(f"{theirs}.encoder_attn.{part}_proj" for part in "kv"))
        yield Rule(f"{ours}.cross.inner.out", f"{theirs}.encoder_attn.out_proj")
        if not attention(config.stacks[side].blocks[0], side).bias:
            for kind in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    yield ConstantTensor(f"{theirs}.{kind}.{part}.bias", (config.width,))
        yield Rule(f"{ours}.feedforward.inner.up", f"{theirs}.fc1")
        yield Rule(f"{ours}.feedforward.inner.down", f"{theirs}.fc2")
        for norm in ("norm_in", "norm_sum"):
            yield Rule(f"{ours}.mixer.{norm}", f"{theirs}.self_attn_layer_norm")
            yield Rule(f"{ours}.cross.{norm}", f"{theirs}.encoder_attn_layer_norm")
            yield Rule(f"{ours}.feedforward.{norm}", f"{theirs}.final_layer_norm")
    yield Rule(f"{side}.final_norm", f"{body}.layer_norm")


def _family(kind: str, heads: dict[str, str], defaults: BartDefaults, text: Framing) -> Family:
    return Family(
        kind=kind,
        shape="encoder-decoder",
        heads=heads,
        text=text,
        prefix="model.",
        buffers=()
        if defaults.table or defaults.stored
        else (r"model\.(en|de)coder\.embed_positions\.weights?",),  # waves
        read=partial(read, defaults),
        write=partial(write, defaults),
        rules=partial(rules, defaults),
    )


FRAMED, ENDED = Framing(before=("bos",), after=("eos",)), Framing(after=("eos",))
HEADS = {
    "BartForConditionalGeneration": "lm",
    "BartForSequenceClassification": "classifier",
    "BartForQuestionAnswering": "span",
    "BartModel": "body",
}
BART = _family("bart", HEADS, BartDefaults(first=False, start=2), FRAMED)
MBART = _family(
    "mbart", {"MBartForConditionalGeneration": "lm", "MBartModel": "body"}, BartDefaults(first=True), FRAMED
)
OPUS = BartDefaults(first=False, positions="halves", vocab=58_101, pad=58_100, bos=None, eos=0, start=58_100)
MARIAN = _family("marian", {"MarianMTModel": "lm", "MarianModel": "body"}, OPUS, ENDED)
GAPPED = BartDefaults(first=True, positions="halves", pad=0, bos=None, eos=1, start=0, stored=True)
PEGASUS = _family("pegasus", {"PegasusForConditionalGeneration": "lm", "PegasusModel": "body"}, GAPPED, ENDED)
MANY = BartDefaults(
    first=True, positions="fairseq", vocab=128_112, activation="relu", scaled=True, attention_dropout=0.1, start=2
)
M2M100 = _family("m2m_100", {"M2M100ForConditionalGeneration": "lm", "M2M100Model": "body"}, MANY, ENDED)
