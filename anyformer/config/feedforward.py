"""Activations, feed-forward layers and mixtures of them. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from anyformer.config.spec import BY_KIND, Count, Fault, Flag, Number, Positive, Probability, Size, Spec

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
    slope: Number = 0.01  # factor of negative inputs


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
    approximate: Literal["none", "tanh"] = "none"  # none: exact; tanh: the tanh approximation of GPT-2


class Silu(Spec):
    """x · sigmoid(x), also called swish."""

    kind: Literal["silu"] = "silu"


class QuickGelu(Spec):
    """x · sigmoid(1.702 x), an approximation of GELU (CLIP)."""

    kind: Literal["quick_gelu"] = "quick_gelu"


Activation = Annotated[Identity | Relu | LeakyRelu | SquaredRelu | Sigmoid | Tanh | Gelu | QuickGelu | Silu, *BY_KIND]

# -- feed-forward ---------------------------------------------------------------------------------------------------


class NoFeedForward(Spec):
    """No feed-forward sublayer."""

    kind: Literal["none"] = "none"


class Plain(Spec):
    """act(x W₁ + b₁) W₂ + b₂, at each position alike."""

    kind: Literal["plain"] = "plain"
    width: Size | None = None  # width of the hidden layer; None: 4 d
    activation: Activation = Relu()  # function between the two linear layers
    bias: Flag = True  # biases b₁ and b₂
    dropout: Probability = 0.0  # on the activations


class Gated(Spec):
    """(act(x W_g) ⊙ x W_u) W_d: GLU, ReGLU, GEGLU, SwiGLU by the activation (Shazeer 2020).

    With `limit`, x W_g is at most that and x W_u is within ± that; `offset` is added to x W_u after it.
    """

    kind: Literal["gated"] = "gated"
    width: Size | None = None  # width of the hidden layer; None: 4 d
    activation: Activation = Silu()  # function of the gate: silu gives SwiGLU, gelu GEGLU, sigmoid GLU
    bias: Flag = False  # biases of the three linear layers
    limit: Positive | None = (
        None  # largest input of the gate, and largest magnitude of x W_u (gpt-oss: 7); None: no limit
    )
    offset: Number = 0.0  # constant added to x W_u (gpt-oss: 1)
    dropout: Probability = 0.0  # on the gated activations


Network = Annotated[Plain | Gated, *BY_KIND]


def hidden_width(spec: Plain | Gated, width: int) -> int:
    """f, given or derived."""
    return spec.width or 4 * width


# -- mixture of experts -----------------------------------------------------------------------------------------------


class SoftmaxTopK(Spec):
    """The k most probable experts by softmax(x W), weighted by their probabilities (Shazeer et al. 2017).

    `normalize` makes these sum to 1, which is a softmax over the chosen alone (Mixtral, Qwen3, gpt-oss); without it
    they stay as they are (Switch, DeepSeek-V2). With `groups`, only experts of the `top_groups` best groups are chosen,
    by the best expert of each.
    """

    kind: Literal["softmax"] = "softmax"
    normalize: Flag = True  # the weights of the chosen experts sum to 1
    bias: Flag = False  # a bias of the router's linear layer (gpt-oss)
    scale: Positive = 1.0  # factor of the weights
    groups: Size = 1  # groups into which the experts are divided
    top_groups: Size = 1  # groups from which a token's experts are chosen


class SigmoidTopK(Spec):
    """The k experts with the largest sigmoid(x W) + bias, weighted by their sigmoid (DeepSeek-V3).

    The bias only chooses. No gradient moves it: after each step it goes up by `rate` for experts that had less than
    their share of the tokens and down for the others, so that no loss needs to balance them (Wang et al. 2024). With
    `groups`, only experts of the `top_groups` best groups are chosen, by the sum of each group's best two.
    """

    kind: Literal["sigmoid"] = "sigmoid"
    normalize: Flag = True  # the weights of the chosen sum to 1, before `scale`
    scale: Positive = 1.0  # factor of the weights
    rate: Annotated[float, Field(strict=True, ge=0)] = 0.001  # change of an expert's bias per training step; 0: fixed
    groups: Size = 1  # groups into which the experts are divided
    top_groups: Size = 1  # groups from which a token's experts are chosen


Router = Annotated[SoftmaxTopK | SigmoidTopK, *BY_KIND]


class Experts(Spec):
    """Σ w_i(x) · F_i(x) over the `top_k` experts that a router chooses for each token; no token is dropped.

    `shared` experts read every token beside them, as one network of `shared` times the width (DeepSeek).
    """

    kind: Literal["experts"] = "experts"
    count: Size  # number of experts, without the shared ones
    top_k: Size  # experts that read each token
    router: Router = SoftmaxTopK()  # rule that chooses and weights the experts
    expert: Network = Gated()  # the feed-forward network of each expert
    shared: Count = 0  # experts that read every token; 0: none
    shared_gate: Flag = False  # multiplies the output of the shared experts by sigmoid(x w) (Qwen2-MoE)
    # weighs a term of the loss: count · Σ_e share of tokens · mean probability; 1 where all experts get alike
    balance: Annotated[float, Field(strict=True, ge=0)] = 0.0

    def faults(self) -> Iterator[Fault]:
        """Yield settings that do not fit together."""
        if self.top_k > self.count:
            yield Fault("top_k", f"= {self.top_k}: must be at most count = {self.count}")
        if self.shared_gate and not self.shared:
            yield Fault("shared_gate", "= True: there are no shared experts; set shared, or leave this out")
        groups, top = self.router.groups, self.router.top_groups
        if self.count % groups:
            yield Fault("router.groups", f"= {groups}: must divide count = {self.count}")
        elif top > groups:
            yield Fault("router.top_groups", f"= {top}: must be at most groups = {groups}")
        elif top * (self.count // groups) < self.top_k <= self.count:
            held = f"{top} of {groups} groups hold {top * (self.count // groups)} experts"
            yield Fault("router.top_groups", f"= {top}: {held}, fewer than top_k = {self.top_k}")


FeedForward = Annotated[NoFeedForward | Plain | Gated | Experts, *BY_KIND]
