"""The frame of decoder-only families: what is around the blocks, and the fields that most of their config.json have."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anyformer import config as spec
from anyformer.config import Attention, Block, Gated, LayerNorm, ModelConfig, Plain, RMSNorm, Rotary, position_of
from anyformer.interop.config_fields import Fields, length_of, name_of, write_rotary
from anyformer.interop.family import PLAIN, Family, Framing, attention, expect, tile_layers
from anyformer.interop.weight_rules import Alias, AnyRule, Conversion, Names, Rule, layer_rules

PLAIN_HEAD = spec.LM()
BUFFERS = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """Names of the fields of a config.json; None: there is no such field."""

    width: str = "hidden_size"
    depth: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str | None = None
    key_width: str | None = None
    ff: str | None = "intermediate_size"
    activation: str | None = "hidden_act"
    eps: str | None = "layer_norm_eps"
    attention_dropout: str | None = "attention_dropout"
    embedding_dropout: str | None = None
    dropout: str | None = None  # after sublayers
    context: str | None = "max_position_embeddings"  # the longest text; None: positions end by themselves


GPT_NAMES = FieldNames(
    width="n_embd",
    depth="n_layer",
    heads="n_head",
    ff="n_inner",
    activation="activation_function",
    eps="layer_norm_epsilon",
    attention_dropout="attn_pdrop",
    embedding_dropout="embd_pdrop",
    dropout="resid_pdrop",
    context=None,
)


@dataclass(frozen=True, kw_only=True)
class DecoderFields:
    """The fields that decoders have in common, with the defaults of a family: `block` and `decoder` read them, and
    `DecoderParts.fields` writes them."""

    names: FieldNames = FieldNames()
    network: type[Plain] | type[Gated] = Plain
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    norm_options: Mapping[str, Any] = field(default_factory=dict)
    vocab: int
    width: int
    depth: int
    heads: int
    kv_heads: int | None = None  # None: heads
    key_width: int | None = None  # None: d / heads
    ff: int | None = None  # None: 4 d
    activation: str = "gelu_new"  # also the name that is written, of several for one function
    eps: float = 1e-5
    dropout: float = 0.0  # after sublayers, and of embeddings and attention
    attention_dropout: float | None = None  # None: `dropout`
    length: int = 2048  # of the longest text
    tied: bool = False
    pad: int | None = None
    bos: int | None = None
    eos: int | None = None

    def block(
        self,
        fields: Fields,
        *,
        bias: bool = False,
        mixer: Mapping[str, Any] | None = None,
        feedforward: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Block:
        """Return a block by its fields; `bias` is that of all projections of attention."""
        names = self.names
        heads, width = fields(names.heads, self.heads), fields(names.width, self.width)
        attends: dict[str, Any] = {"heads": heads, "bias": bias, "output": spec.Projected(bias=bias)}
        if names.attention_dropout:
            drop = self.dropout if self.attention_dropout is None else self.attention_dropout
            attends["dropout"] = fields(names.attention_dropout, drop)
        if names.kv_heads:
            attends["kv_heads"] = fields(names.kv_heads, self.kv_heads or heads)
        if names.key_width:
            attends["key_width"] = fields(names.key_width, self.key_width or width // heads)
        network: dict[str, Any] = {}
        if names.ff:
            network["width"] = fields.maybe(names.ff, int) if self.ff is None else fields(names.ff, self.ff)
        if names.activation:
            network["activation"] = fields.activation(names.activation, self.activation)
        return Block(
            mixer=Attention(**attends | dict(mixer or {})),
            feedforward=self.network(**network | dict(feedforward or {})),
            norm=self.normed(fields),
            dropout=fields(names.dropout, self.dropout) if names.dropout else 0.0,
            **more,
        )

    def normed(self, fields: Fields) -> LayerNorm | RMSNorm:
        """Return the norm of the blocks."""
        eps: dict[str, Any] = {"eps": fields(self.names.eps, self.eps)} if self.names.eps else {}
        return self.norm(**eps, **self.norm_options)

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
        names = self.names
        if isinstance(layers, Block):
            layers = [layers] * self.read_depth(fields)
        drop = fields(names.embedding_dropout, self.dropout) if names.embedding_dropout else 0.0
        vocab, tied = fields("vocab_size", self.vocab), fields("tie_word_embeddings", self.tied)
        prefix, blocks = tile_layers(layers)
        return ModelConfig(
            width=fields(names.width, self.width),
            target=spec.Tokens(vocab=vocab, dropout=drop, **(tokens or {})),
            decoder=spec.Stack(
                depth=len(layers), prefix=prefix, blocks=blocks, position=position, final_norm=layers[0].norm
            ),
            head=head if fields.head == "lm" else spec.NoHead(),
            tie="output" if tied and fields.head == "lm" else "none",
            special=fields.special(vocab, pad=self.pad, bos=self.bos, eos=self.eos),
            context=None if names.context is None else fields.maybe(names.context, int),
        )

    def read_depth(self, fields: Fields) -> int:
        return fields.depth(self.names.depth, self.depth)

    def parts(self, config: ModelConfig) -> "DecoderParts":
        """Return the parts of a decoder, by its first layer; raise where one is of another kind."""
        stack = expect(config.decoder, spec.Stack, "decoder")
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

    @property
    def eps(self) -> float:
        norm = self.block.norm
        return norm.eps if isinstance(norm, RMSNorm) else expect(norm, self.family.norm, "decoder.blocks.0.norm").eps

    def fields(self) -> dict[str, Any]:
        """Return the fields that `DecoderFields` reads."""
        names, default = self.family.names, self.family.activation
        found = {
            "vocab_size": self.tokens.rows,
            "tie_word_embeddings": self.config.tie == "output",
            names.width: self.config.width,
            names.depth: self.stack.depth,
            names.heads: self.mixer.heads,
            names.kv_heads: self.mixer.groups,
            names.key_width: self.key,
            names.ff: self.feedforward.hidden(self.config.width),
            names.activation: name_of(self.feedforward.activation, first=default),
            names.eps: self.eps if names.eps else None,
            names.attention_dropout: self.mixer.dropout,
            names.embedding_dropout: self.tokens.dropout,
            names.dropout: self.block.dropout,
        }
        return {name: value for name, value in found.items() if name is not None}

    def rotary_fields(self, rotary: Rotary | None = None, *, fraction: bool = False) -> dict[str, Any]:
        """Return the fields of rotary positions, by default those of the first layer; `fraction` is always written."""
        rotary = rotary or self.rotary
        parameters = write_rotary(rotary, self.key)
        return {
            "max_position_embeddings": self.config.context or length_of(rotary, self.family.length),
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
    assert config.decoder
    if positions:
        yield Rule("decoder.embedder.tables.positions", positions)
    yield from layer_rules("decoder.blocks", layers, config.decoder.depth, names, conversions)
    yield from end_rules(config, **ends)


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
