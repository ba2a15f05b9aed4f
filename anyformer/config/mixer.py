"""Mixers: what lets tokens read each other. Imports no torch."""

from typing import Annotated, Literal

from anyformer.config.norm import NoNorm, Norm
from anyformer.config.pattern import Pattern
from anyformer.config.position import Position
from anyformer.config.spec import BY_KIND, Flag, Number, Probability, Size, Spec, by_kind


class Unscaled(Spec):
    """A factor of 1."""

    kind: Literal["none"] = "none"


class Times(Spec):
    """A number."""

    kind: Literal["value"] = "value"
    value: Number


class InvSqrtKey(Spec):
    """1/sqrt(k), the head width: keeps the variance of scores near 1."""

    kind: Literal["inv_sqrt_key"] = "inv_sqrt_key"


class InvSqrtWidth(Spec):
    """1/sqrt(d)."""

    kind: Literal["inv_sqrt_width"] = "inv_sqrt_width"


class SqrtWidth(Spec):
    """sqrt(d)."""

    kind: Literal["sqrt_width"] = "sqrt_width"


Scale = Annotated[Unscaled | Times | InvSqrtKey | InvSqrtWidth, *BY_KIND]


def factor(scale: Unscaled | Times | InvSqrtKey | InvSqrtWidth | SqrtWidth, width: int, key_width: int = 1) -> float:
    """The number a scale stands for."""
    match scale:
        case Unscaled():
            return 1.0
        case Times(value=value):
            return value
        case InvSqrtKey():
            return key_width**-0.5
        case InvSqrtWidth():
            return width**-0.5
        case SqrtWidth():
            return width**0.5


class NoOutput(Spec):
    """The concatenated heads as they are (then h·k_v must be d)."""

    kind: Literal["none"] = "none"


class Projected(Spec):
    """A linear layer that mixes the heads."""

    kind: Literal["linear"] = "linear"
    bias: Flag = False


Output = Annotated[NoOutput | Projected, *BY_KIND]


class Attention(Spec):
    """softmax(Q Kᵀ · scale + mask + bias) V in h heads, each a projection of the whole embedding."""

    kind: Literal["attention"] = "attention"
    heads: Size
    kv_heads: Size | None = None  # None: heads; fewer: grouped-query, 1: multi-query
    key_width: Size | None = None  # None: d / heads
    value_width: Size | None = None  # None: key_width
    projections: Literal["separate", "shared_qk", "shared_qkv"] = "separate"
    bias: Flag = False  # of the query, key and value projections
    output: Output = Projected()
    qk_norm: Norm = NoNorm()  # over each head's queries and keys, before positions
    scale: Scale = InvSqrtKey()
    normalizer: Literal["softmax", "relu"] = "softmax"  # relu: relu(scores) / number of visible keys
    pattern: Pattern | None = None  # None: causal in a decoder, full in an encoder and across
    position: Position | None = None  # None: the stack's
    dropout: Probability = 0.0  # on the attention weights

    @property
    def groups(self) -> int:
        """Key/value heads, given or derived."""
        return self.kv_heads or self.heads

    def widths(self, width: int) -> tuple[int, int]:
        """Head width of queries and keys, and of values, given or derived."""
        key = self.key_width or width // self.heads
        return key, self.value_width or key


class NoMixer(Spec):
    """No token reads another: with it everywhere, a language model is a bigram model."""

    kind: Literal["none"] = "none"


Mixer = Annotated[Attention | NoMixer, *by_kind("attention")]
