"""Activations and feed-forward layers. Imports no torch."""

from typing import Annotated, Literal

from anyformer.config.spec import BY_KIND, Flag, Number, Probability, Size, Spec

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
