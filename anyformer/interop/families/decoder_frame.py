"""The frame of decoder-only families: what is around the blocks, and the fields that most of their config.json have."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from anyformer.config import (
    LM,
    Attention,
    Block,
    Gated,
    LayerNorm,
    ModelConfig,
    NoHead,
    Plain,
    Position,
    RMSNorm,
    Rotary,
    Stack,
    Tokens,
    position_of,
)
from anyformer.interop.config_fields import Fields, length_of, name_of, write_rotary
from anyformer.interop.family import PLAIN, Family, Framing, attention, expect, tile_layers
from anyformer.interop.weight_rules import Alias, AnyRule, Rule

PLAIN_HEAD = LM()
BUFFERS = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
F = TypeVar("F", Plain, Gated)


@dataclass(frozen=True)
class Ends:
    """Defaults of the fields around the blocks of a decoder."""

    vocab: int
    tied: bool
    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    context: str | None = "max_position_embeddings"  # field of the longest text; None: positions end by themselves


def build_decoder(
    fields: Fields,
    width: int,
    layers: Sequence[Block],
    position: Position,
    ends: Ends,
    *,
    tokens: Mapping[str, Any] | None = None,
    head: LM = PLAIN_HEAD,
) -> ModelConfig:
    """Return a decoder of these layers, whose final norm is that of its blocks."""
    vocab, tied = fields("vocab_size", ends.vocab), fields("tie_word_embeddings", ends.tied)
    prefix, blocks = tile_layers(layers)
    return ModelConfig(
        width=width,
        target=Tokens(vocab=vocab, **(tokens or {})),
        decoder=Stack(depth=len(layers), prefix=prefix, blocks=blocks, position=position, final_norm=layers[0].norm),
        head=head if fields.head == "lm" else NoHead(),
        tie="output" if tied and fields.head == "lm" else "none",
        special=fields.special(vocab, pad=ends.pad, bos=ends.bos, eos=ends.eos),
        context=None if ends.context is None else fields.maybe(ends.context, int),
    )


@dataclass(frozen=True)
class DecoderParts(Generic[F]):
    """The parts of a decoder whose layers are alike, for `write`."""

    config: ModelConfig
    stack: Stack
    tokens: Tokens
    block: Block
    mixer: Attention
    feedforward: F

    @staticmethod
    def of(config: ModelConfig, feedforward: type[F]) -> "DecoderParts[F]":
        """Return the parts, by the first layer; raise where one is of another kind."""
        stack = expect(config.decoder, Stack, "decoder")
        block = stack.unrolled()[0]
        found = expect(block.feedforward, feedforward, "decoder.blocks.0.feedforward")
        return DecoderParts(config, stack, expect(config.target, Tokens, "target"), block, attention(block), found)

    @property
    def key(self) -> int:
        return self.mixer.widths(self.config.width)[0]

    @property
    def ff(self) -> int:
        return self.feedforward.hidden(self.config.width)

    @property
    def rotary(self) -> Rotary:
        return expect(position_of(self.mixer, self.stack), Rotary, "decoder.position")

    @property
    def eps(self) -> float:
        norm = self.block.norm
        return norm.eps if isinstance(norm, RMSNorm) else expect(norm, LayerNorm, "decoder.blocks.0.norm").eps

    def fields(self, activation: str = "") -> dict[str, Any]:
        """Return the fields of most families; `activation` is its preferred name, if it has several."""
        return {
            "vocab_size": self.tokens.rows,
            "hidden_size": self.config.width,
            "intermediate_size": self.ff,
            "num_hidden_layers": self.stack.depth,
            "num_attention_heads": self.mixer.heads,
            "hidden_act": name_of(self.feedforward.activation, first=activation),
            "attention_dropout": self.mixer.dropout,
            "tie_word_embeddings": self.config.tie == "output",
        }

    def gpt_fields(self) -> dict[str, Any]:
        """Return the fields of GPT-2 and GPT-J."""
        return {
            "vocab_size": self.tokens.rows,
            "n_embd": self.config.width,
            "n_layer": self.stack.depth,
            "n_head": self.mixer.heads,
            "n_inner": self.ff,
            "activation_function": name_of(self.feedforward.activation, first="gelu_new"),
            "layer_norm_epsilon": self.eps,
            "resid_pdrop": self.block.dropout,
            "embd_pdrop": self.tokens.dropout,
            "attn_pdrop": self.mixer.dropout,
            "tie_word_embeddings": self.config.tie == "output",
        }

    def rotary_fields(self, length: int, *, fraction: bool = False) -> dict[str, Any]:
        """Return the fields of rotary positions, for texts of `length` by default; `fraction` is always written."""
        parameters = write_rotary(self.rotary, self.key)
        return {
            "max_position_embeddings": self.config.context or length_of(self.rotary, length),
            "rope_parameters": parameters | ({"partial_rotary_factor": self.rotary.fraction} if fraction else {}),
        }


def llama_like(
    kind: str,
    title: str,
    read: Callable[[Fields], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    rules: Callable[[ModelConfig], Iterable[AnyRule]],
    text: Framing = PLAIN,
) -> Family:
    """Return a family of decoders whose weights have Llama's prefix and buffers; `title` begins its classes."""
    return Family(
        kind=kind,
        shape="decoder",
        heads={f"{title}ForCausalLM": "lm", f"{title}Model": "body"},
        text=text,
        prefix="model.",
        buffers=BUFFERS,
        read=read,
        write=write,
        rules=rules,
    )


def end_rules(
    config: ModelConfig, table: str = "model.embed_tokens", norm: str = "model.norm", head: str = "lm_head"
) -> Iterator[AnyRule]:
    """Yield the table, the final norm and the head of a decoder."""
    yield Rule("target.table", table)
    yield Rule("decoder.final_norm", norm)
    yield Rule("head.table", f"{head}.weight")
    yield Rule("head.bias", f"{head}.bias")
    if config.tie == "output":
        yield Alias(f"{head}.weight", of=f"{table}.weight")
