"""The parts of a block and a stack, each a spec. This page answers: what can I vary?

Positions are in `position.py`, inputs and heads in `ends.py`.

Alternatives are types with a `kind`; a field exists only where it has meaning; "nothing" is the kind "none". A field
that is `None` by default follows from the others, as its comment says. Everything is frozen and hashable.
Legend of sizes: b batch, t query length, s key length, d width, h heads, g key/value heads, k head width,
f feed-forward width, e embedding width, v vocabulary.

Imports no torch.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from anyformer.config.position import NoPosition, Position
from anyformer.config.spec import BY_KIND, Count, Flag, Number, Positive, Probability, Size, Spec

if TYPE_CHECKING:
    from torch import Tensor

# -- norms ----------------------------------------------------------------------------------------------------------


class NoNorm(Spec):
    """The identity."""

    kind: Literal["none"] = "none"


class LayerNorm(Spec):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β over the last axis (Ba et al. 2016)."""

    kind: Literal["layer"] = "layer"
    eps: Positive = 1e-5
    bias: Flag = True


class RMSNorm(Spec):
    """x / sqrt(E[x²] + eps) · (offset + γ) (Zhang & Sennrich 2019); Gemma's offset is 1.

    `cast` says where the fp32 result returns to the input's precision: before γ (Llama, T5) or after it (Gemma).
    """

    kind: Literal["rms"] = "rms"
    eps: Positive = 1e-6
    offset: Number = 0.0
    cast: Literal["before_scale", "after_scale"] = "before_scale"


Norm = Annotated[NoNorm | LayerNorm | RMSNorm, *BY_KIND]

# -- activations ----------------------------------------------------------------------------------------------------


class Identity(Spec):
    """f(x) = x: a bilinear gate, or an ablation."""

    kind: Literal["identity"] = "identity"


class Relu(Spec):
    """max(0, x)."""

    kind: Literal["relu"] = "relu"


class LeakyRelu(Spec):
    """x where positive, slope · x where negative."""

    kind: Literal["leaky_relu"] = "leaky_relu"
    slope: Number = 0.01


class SquaredRelu(Spec):
    """max(0, x)² (So et al. 2021)."""

    kind: Literal["squared_relu"] = "squared_relu"


class Sigmoid(Spec):
    """1 / (1 + exp(-x)); as a gate: GLU."""

    kind: Literal["sigmoid"] = "sigmoid"


class Tanh(Spec):
    """tanh(x)."""

    kind: Literal["tanh"] = "tanh"


class Gelu(Spec):
    """x · Φ(x), exact or by its tanh approximation (Hendrycks & Gimpel 2016)."""

    kind: Literal["gelu"] = "gelu"
    approximate: Literal["none", "tanh"] = "none"


class Silu(Spec):
    """x · sigmoid(x), also called swish."""

    kind: Literal["silu"] = "silu"


Activation = Annotated[Identity | Relu | LeakyRelu | SquaredRelu | Sigmoid | Tanh | Gelu | Silu, *BY_KIND]

# -- feed-forward ---------------------------------------------------------------------------------------------------


class NoFeedForward(Spec):
    """No feed-forward sublayer."""

    kind: Literal["none"] = "none"


class Plain(Spec):
    """act(x W₁ + b₁) W₂ + b₂, at each position alike."""

    kind: Literal["plain"] = "plain"
    width: Size | None = None  # None: 4 d
    activation: Activation = Relu()
    bias: Flag = True
    dropout: Probability = 0.0  # on the activations


class Gated(Spec):
    """(act(x W_g) ⊙ x W_u) W_d: GLU, ReGLU, GEGLU, SwiGLU by the activation (Shazeer 2020)."""

    kind: Literal["gated"] = "gated"
    width: Size | None = None  # None: 4 d
    activation: Activation = Silu()
    bias: Flag = False
    dropout: Probability = 0.0


FeedForward = Annotated[NoFeedForward | Plain | Gated, *BY_KIND]


def hidden_width(spec: Plain | Gated, width: int) -> int:
    """f, given or derived."""
    return spec.width or 4 * width


# -- attention ------------------------------------------------------------------------------------------------------


class Full(Spec):
    """Every key."""

    kind: Literal["full"] = "full"

    @property
    def looks_ahead(self) -> bool:
        return True

    def sees(self, q: "Tensor", k: "Tensor") -> "Tensor":
        return (q == q) & (k == k)


class Causal(Spec):
    """The past and oneself."""

    kind: Literal["causal"] = "causal"

    @property
    def looks_ahead(self) -> bool:
        return False

    def sees(self, q: "Tensor", k: "Tensor") -> "Tensor":
        return k <= q


class Window(Spec):
    """At most `before` keys back and `after` keys ahead: causal when `after` is 0."""

    kind: Literal["window"] = "window"
    before: Count
    after: Count

    @property
    def looks_ahead(self) -> bool:
        return self.after > 0

    def sees(self, q: "Tensor", k: "Tensor") -> "Tensor":
        return (q - k <= self.before) & (k - q <= self.after)


Pattern = Annotated[Full | Causal | Window, *BY_KIND]
"""`sees(q, k)` defines a pattern: whether a query at position q may read a key at position k (broadcast)."""


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


Mixer = Attention

# -- blocks and stacks ----------------------------------------------------------------------------------------------


class Sequential(Spec):
    """One sublayer after the other."""

    kind: Literal["sequential"] = "sequential"


class Parallel(Spec):
    """All sublayers read the same input and their outputs are summed; `shared_norm`: through one norm."""

    kind: Literal["parallel"] = "parallel"
    shared_norm: Flag = False


Order = Annotated[Sequential | Parallel, *BY_KIND]


class Block(Spec):
    """Sublayers and where their norms stand.

    pre x + F(N x) · post N(x + F x) · branch x + N(F x) · sandwich x + N₂(F(N₁ x))
    """

    mixer: Mixer
    cross: Attention | None = None  # reads the encoder's output
    feedforward: FeedForward = Plain()
    norm: Norm = LayerNorm()
    placement: Literal["pre", "post", "branch", "sandwich"] = "pre"
    order: Order = Sequential()
    dropout: Probability = 0.0  # on each sublayer's output


def _one_or_many(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


Blocks = Annotated[tuple[Block, ...], BeforeValidator(_one_or_many, json_schema_input_type=tuple[Block, ...] | Block)]


class Stack(Spec):
    """`prefix` blocks once, then `blocks` tiled to `depth`; with `share`, the tile's weights are reused (ALBERT)."""

    depth: Size
    blocks: Blocks
    prefix: Blocks = ()
    share: Flag = False
    position: Position = NoPosition()
    final_norm: Norm = NoNorm()
    dropout: Probability = 0.0  # on the output (T5)

    def unrolled(self) -> tuple[Block, ...]:
        """The block of each layer."""
        rest = self.depth - len(self.prefix)
        return self.prefix + tuple(self.blocks[i % len(self.blocks)] for i in range(rest))
