"""The fields of blocks that most families have: each is read and written by one table of names and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anyformer import config as spec
from anyformer.config import Attention, Block, Gated, LayerNorm, Plain, RMSNorm
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.family import expect


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


@dataclass(frozen=True, kw_only=True)
class BlockFields:
    """The fields of blocks, with the defaults of a family: `block` reads them, and `written` writes them."""

    names: FieldNames = FieldNames()
    network: type[Plain] | type[Gated] = Plain
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    norm_options: Mapping[str, Any] = field(default_factory=dict)
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

    def read_depth(self, fields: Fields) -> int:
        return fields.depth(self.names.depth, self.depth)

    def written(self, stack: spec.Stack, width: int, path: str, block: Block | None = None) -> dict[str, Any]:
        """Return the fields of a stack whose layers are alike, by one block."""
        block, names = block or stack.blocks[0], self.names
        network = expect(block.feedforward, self.network, f"{path}.blocks.0.feedforward")
        mixer = expect(block.mixer, Attention, f"{path}.blocks.0.mixer")
        found = {
            names.width: width,
            names.depth: stack.depth,
            names.heads: mixer.heads,
            names.kv_heads: mixer.groups,
            names.key_width: mixer.widths(width)[0],
            names.ff: network.hidden(width),
            names.activation: name_of(network.activation, first=self.activation),
            names.eps: self.eps_of(block.norm, f"{path}.blocks.0.norm") if names.eps else None,
            names.attention_dropout: mixer.dropout,
            names.dropout: block.dropout,
        }
        return {name: value for name, value in found.items() if name is not None}

    def eps_of(self, norm: spec.Norm, path: str) -> float:
        return expect(norm, self.norm, path).eps
