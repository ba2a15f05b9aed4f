"""The fields of blocks that most families have: each is read and written by its name. Its default is in the data of
`transformers_fields.py`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anyformer import config as spec
from anyformer.config import Attention, Block, Gated, LayerNorm, Plain, RMSNorm, Window, pattern_of, position_of
from anyformer.interop.config_fields import Fields, name_of
from anyformer.interop.family import attention, expect, with_mixer
from anyformer.interop.rotary_fields import FULL, NEAR
from anyformer.interop.transformers_fields import fields_of


@dataclass(frozen=True, kw_only=True)
class BlockFields:
    """Names of the fields of a config.json; None: there is no such field. `block` reads them, and `written` writes
    them."""

    kind: str  # of the family, whose defaults they have
    width: str = "hidden_size"
    depth: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str | None = None
    key_width: str | None = None
    bias: str | None = None  # of all projections of attention
    attention_dropout: str | None = "attention_dropout"
    ff: str | None = "intermediate_size"
    activation: str | None = "hidden_act"
    network_bias: str | None = None
    network_dropout: str | None = None  # inside feed-forwards
    eps: str | None = "layer_norm_eps"
    embedding_dropout: str | None = None
    dropout: str | None = None  # after sublayers
    context: str | None = "max_position_embeddings"  # the longest text; None: positions end by themselves
    network: type[Plain] | type[Gated] = Plain
    norm: type[LayerNorm] | type[RMSNorm] = LayerNorm
    norm_options: Mapping[str, Any] = field(default_factory=dict)

    def default(self, name: str | None) -> Any:
        """Return the default of a field, None if it has none."""
        return name and fields_of(self.kind).fields[name]

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
        heads, width = fields(self.heads), fields(self.width)
        bias = fields(self.bias) if self.bias else bias
        attends: dict[str, Any] = {"heads": heads, "bias": bias, "output": spec.Projected(bias=bias)}
        if self.attention_dropout:
            attends["dropout"] = fields(self.attention_dropout)
        if self.kv_heads:
            attends["kv_heads"] = fields(self.kv_heads, fields.default(self.kv_heads) or heads)
        if self.key_width:
            attends["key_width"] = fields(self.key_width, fields.default(self.key_width) or width // heads)
        network: dict[str, Any] = {}
        if self.ff:
            network["width"] = fields.maybe(self.ff, int) or fields.default(self.ff)
        if self.activation:
            network["activation"] = fields.activation(self.activation)
        if self.network_bias:
            network["bias"] = fields(self.network_bias)
        if self.network_dropout:
            network["dropout"] = fields(self.network_dropout)
        return Block(
            mixer=Attention(**attends | dict(mixer or {})),
            feedforward=self.network(**network | dict(feedforward or {})),
            norm=self.normed(fields),
            dropout=fields(self.dropout) if self.dropout else 0.0,
            **more,
        )

    def normed(self, fields: Fields) -> LayerNorm | RMSNorm:
        """Return the norm of the blocks."""
        eps: dict[str, Any] = {"eps": fields(self.eps)} if self.eps else {}
        return self.norm(**eps, **self.norm_options)

    def read_depth(self, fields: Fields) -> int:
        return fields.depth(self.depth)

    def written(self, stack: spec.Stack, width: int, path: str, block: Block | None = None) -> dict[str, Any]:
        """Return the fields of a stack whose layers are alike, by one block."""
        block = block or stack.blocks[0]
        network = expect(block.feedforward, self.network, f"{path}.blocks.0.feedforward")
        mixer = expect(block.mixer, Attention, f"{path}.blocks.0.mixer")
        found = {
            self.width: width,
            self.depth: stack.depth,
            self.heads: mixer.heads,
            self.kv_heads: mixer.groups,
            self.key_width: mixer.widths(width)[0],
            self.ff: network.hidden(width),
            self.activation: name_of(network.activation, first=self.default(self.activation)),
            self.network_bias: network.bias,
            self.network_dropout: network.dropout,
            self.bias: mixer.bias,
            self.eps: self.eps_of(block.norm, f"{path}.blocks.0.norm") if self.eps else None,
            self.attention_dropout: mixer.dropout,
            self.dropout: block.dropout,
        }
        return {name: value for name, value in found.items() if name is not None}

    def eps_of(self, norm: spec.Norm, path: str) -> float:
        return expect(norm, self.norm, path).eps


# -- layers with and without a window ---------------------------------------------------------------------------------


def sliding(block: Block, size: int, **changes: Any) -> Block:
    """Return a block whose tokens attend to themselves and those before them, `size` in all."""
    return with_mixer(block, pattern=Window(before=size - 1, after=0), **changes)


class LayerKinds(NamedTuple):
    """The layers of a stack by kind."""

    kinds: list[str]  # of each
    size: int | None  # of the largest window; None: there is none
    mixers: list[Attention]

    @classmethod
    def of(cls, layers: Iterable[Block], side: spec.Side = "decoder") -> "LayerKinds":
        mixers = [attention(block, side) for block in layers]
        patterns = [pattern_of(mixer, side) for mixer in mixers]
        sizes = [pattern.before + 1 for pattern in patterns if isinstance(pattern, Window)]
        kinds = [NEAR if isinstance(pattern, Window) else FULL for pattern in patterns]
        return cls(kinds, max(sizes, default=None), mixers)

    def ropes(self, stack: spec.Stack, side: spec.Side = "decoder") -> dict[str, spec.Rotary]:
        """Return the rotary positions of each kind of layers; raise where one has others."""
        positions = (position_of(mixer, stack) for mixer in self.mixers)
        return {
            kind: expect(position, spec.Rotary, f"{side}.position")
            for kind, position in zip(self.kinds, positions, strict=True)
        }
