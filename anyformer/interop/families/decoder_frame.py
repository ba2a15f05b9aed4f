"""The frame of decoder-only families: the parts around the blocks, and the fields of most of their config.json."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anyformer import config as spec
from anyformer.config import Attention, Block, Gated, ModelConfig, Plain, RMSNorm, Rotary, position_of
from anyformer.interop.config_fields import Fields
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.family import PLAIN, Family, Framing, attention, expect, stack_of, tile_layers
from anyformer.interop.rotary_fields import write_rotary
from anyformer.interop.weight_rules import Alias, AnyRule, Conversion, Names, Rule, layer_rules

PLAIN_HEAD = spec.LM()
BUFFERS = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class DecoderFields(BlockFields):
    """The fields that decoders have in common: `block` and `decoder` read them, and `DecoderParts.fields` writes
    them."""

    @property
    def length(self) -> int:
        """The default length of the longest text."""
        found: int = self.default(self.context)
        return found

    def decoder(
        self,
        fields: Fields,
        layers: Block | Sequence[Block],
        position: spec.Position,
        *,
        tokens: Mapping[str, Any] | None = None,
        head: spec.LM = PLAIN_HEAD,
    ) -> ModelConfig:
        """Return a decoder of these layers, or of one for all; its final norm is that of its blocks."""
        if isinstance(layers, Block):
            layers = [layers] * self.read_depth(fields)
        drop = fields(self.embedding_dropout) if self.embedding_dropout else 0.0
        vocab, tied = fields("vocab_size"), fields("tie_word_embeddings")
        prefix, blocks = tile_layers(layers)
        return ModelConfig(
            width=fields(self.width),
            target=spec.Tokens(vocab=vocab, dropout=drop, **(tokens or {})),
            decoder=spec.Stack(
                depth=len(layers), prefix=prefix, blocks=blocks, position=position, final_norm=layers[0].norm
            ),
            head=head if fields.head == "lm" else spec.NoHead(),
            tie="output" if tied and fields.head == "lm" else "none",
            special=fields.special(vocab),
            context=None if self.context is None else fields.maybe(self.context, int),
        )

    def eps_of(self, norm: spec.Norm, path: str) -> float:
        """Also return that of an RMS norm in the place of another, which `differences` then names."""
        return norm.eps if isinstance(norm, RMSNorm) else super().eps_of(norm, path)

    def parts(self, config: ModelConfig) -> "DecoderParts":
        """Return the parts of a decoder, by its first layer; raise where one is of another kind."""
        stack = stack_of(config)
        block = stack.unrolled()[0]
        network = expect(block.feedforward, self.network, "decoder.blocks.0.feedforward")
        tokens = expect(config.target, spec.Tokens, "target")
        return DecoderParts(self, config, stack, tokens, block, attention(block), network)


@dataclass(frozen=True)
class DecoderParts:
    """The parts of a decoder whose layers are alike, for `write`."""

    family: DecoderFields
    config: ModelConfig
    stack: spec.Stack
    tokens: spec.Tokens
    block: Block
    mixer: Attention
    feedforward: Plain | Gated

    @property
    def key(self) -> int:
        return self.mixer.widths(self.config.width)[0]

    @property
    def rotary(self) -> Rotary:
        return expect(position_of(self.mixer, self.stack), Rotary, "decoder.position")

    @property
    def positions(self) -> int:
        """The length of a table of positions."""
        return expect(self.stack.position, spec.Learned, "decoder.position").length

    def fields(self) -> dict[str, Any]:
        """Return the fields that `DecoderFields` reads."""
        found: dict[str, Any] = {"vocab_size": self.tokens.rows, "tie_word_embeddings": self.config.tie == "output"}
        if self.family.embedding_dropout:
            found[self.family.embedding_dropout] = self.tokens.dropout
        return found | self.family.written(self.stack, self.config.width, "decoder", self.block)

    def rotary_fields(self, rotary: Rotary | None = None, *, fraction: bool = False) -> dict[str, Any]:
        """Return the fields of rotary positions, by default those of the first layer; `fraction` is always written."""
        rotary = rotary or self.rotary
        parameters = write_rotary(rotary, self.key)
        return {
            "max_position_embeddings": self.config.context or rotary.trained_length or self.family.length,
            "rope_parameters": parameters | ({"partial_rotary_factor": rotary.fraction} if fraction else {}),
        }


def decoder_family(
    kind: str,
    title: str,
    read: Callable[[Fields], ModelConfig],
    write: Callable[[ModelConfig], dict[str, Any]],
    rules: Callable[[ModelConfig], Iterable[AnyRule]],
    text: Framing = PLAIN,
    **more: Any,
) -> Family:
    """Return a family of decoders, by default with Llama's prefix and buffers; `title` begins its classes."""
    heads = {f"{title}ForCausalLM": "lm", f"{title}Model": "body"}
    usual: dict[str, Any] = {"heads": heads, "prefix": "model.", "buffers": BUFFERS}
    return Family(kind=kind, shape="decoder", text=text, read=read, write=write, rules=rules, **usual | more)


def decoder_rules(
    layers: str,
    names: Names,
    config: ModelConfig,
    *,
    conversions: Mapping[str, Conversion] | None = None,
    positions: str = "",
    **ends: str,
) -> Iterator[AnyRule]:
    """Yield the rules of a decoder with these names in its `layers`; `positions` is a table of them."""
    yield from end_rules(config, **ends)
    if positions:
        yield Rule("decoder.embedder.tables.positions", positions)
    yield from layer_rules("decoder.blocks", layers, stack_of(config).depth, names, conversions)


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


# -- heads besides the language model: labels of a text by its last token, and spans ----------------------------------

TITLES = {"gemma3_text": "Gemma3Text"}  # of classes whose names do not begin as that of the language model
WITHOUT = ("cohere", "xglm")  # `transformers` has no such classes
WITH_SPANS = ("gpt2", "gpt_neox", "bloom", "falcon", "mistral", "mixtral")  # others of these have other weight names


def with_heads(family: Family) -> Family:
    """Return a family of decoders with `...ForSequenceClassification`, and some with `...ForQuestionAnswering`."""
    if family.shape != "decoder" or "lm" not in family.heads.values() or family.kind in WITHOUT:
        return family
    model = next(name for name, head in family.heads.items() if head == "lm")
    title = TITLES.get(family.kind, model.removesuffix("ForCausalLM").removesuffix("LMHeadModel"))
    heads = {**family.heads, f"{title}ForSequenceClassification": "classifier"}
    if family.kind in WITH_SPANS:
        heads[f"{title}ForQuestionAnswering"] = "span"

    def read(fields: Fields) -> ModelConfig:
        found = family.read(fields)
        if fields.head not in ("classifier", "span"):
            return found
        if isinstance(found.target, spec.Tokens) and isinstance(found.target.table, spec.FactorisedTable):
            fields.refuse("word_embed_proj_dim", f"= {found.target.table.width}: this head reads hidden_size values")
        if fields.head == "span":
            return found.model_copy(update={"head": spec.SpanBounds()})
        labels = len(fields.labels())
        return found.model_copy(update={"head": spec.Classifier(labels=labels, pool="last", bias=False)})

    def rules(config: ModelConfig) -> Iterator[AnyRule]:
        yield from family.rules(config)
        yield Rule("head.last.1", "score")
        if isinstance(config.head, spec.SpanBounds):
            yield Rule("head.linear", "qa_outputs")

    return replace(family, heads=heads, read=read, rules=rules)
