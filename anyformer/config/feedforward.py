"""Activations, feed-forward layers and mixtures of them. Imports no torch."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from anyformer.config.cost import Cost, Matrix, linear
from anyformer.config.families import (
    Activation as Activation,
    FeedForward as FeedForward,
    Network as Network,
)
from anyformer.config.part import Part
from anyformer.config.spec import Count, Fault, Flag, Number, Positive, Probability, Size

if TYPE_CHECKING:
    from torch import Tensor, nn

# -- activations ----------------------------------------------------------------------------------------------------


class Identity(Activation):
    """f(x) = x: a bilinear gate, or an ablation."""

    kind: Literal["identity"] = "identity"
    saves_input: ClassVar[bool] = False

    def function(self) -> "Callable[[Tensor], Tensor]":
        return lambda x: x


class Relu(Activation):
    """max(0, x)."""

    kind: Literal["relu"] = "relu"
    saves_input: ClassVar[bool] = False
    fused: ClassVar = "relu"

    def function(self) -> "Callable[[Tensor], Tensor]":
        from torch.nn import functional as F

        return F.relu


class LeakyRelu(Activation):
    """x where positive, slope · x where negative."""

    kind: Literal["leaky_relu"] = "leaky_relu"
    slope: Number = 0.01  # factor of negative inputs

    def function(self) -> "Callable[[Tensor], Tensor]":
        from torch.nn import functional as F

        return partial(F.leaky_relu, negative_slope=self.slope)


class SquaredRelu(Activation):
    """max(0, x)² (So et al. 2021)."""

    kind: Literal["squared_relu"] = "squared_relu"

    def function(self) -> "Callable[[Tensor], Tensor]":
        from torch.nn import functional as F

        return lambda x: F.relu(x).square()


class Sigmoid(Activation):
    """1 / (1 + exp(-x)); as a gate: GLU."""

    kind: Literal["sigmoid"] = "sigmoid"
    saves_input: ClassVar[bool] = False

    def function(self) -> "Callable[[Tensor], Tensor]":
        from torch.nn import functional as F

        return F.sigmoid


class Tanh(Activation):
    """tanh(x)."""

    kind: Literal["tanh"] = "tanh"
    saves_input: ClassVar[bool] = False

    def function(self) -> "Callable[[Tensor], Tensor]":
        from torch.nn import functional as F

        return F.tanh


class Gelu(Activation):
    """x · Φ(x), exact or by its tanh approximation (Hendrycks & Gimpel 2016)."""

    kind: Literal["gelu"] = "gelu"
    approximate: Literal["none", "tanh"] = "none"  # none: exact; tanh: the tanh approximation of GPT-2

    def function(self) -> "Callable[[Tensor], Tensor]":
        from anyformer.kernels.gelu import gelu

        return partial(gelu, approximate=self.approximate)

    @property
    def fused(self) -> str:
        return {"none": "gelu", "tanh": "gelu_tanh"}[self.approximate]


class Silu(Activation):
    """x · sigmoid(x), also called swish."""

    kind: Literal["silu"] = "silu"

    def function(self) -> "Callable[[Tensor], Tensor]":
        from torch.nn import functional as F

        return F.silu


class QuickGelu(Activation):
    """x · sigmoid(1.702 x), an approximation of GELU (CLIP)."""

    kind: Literal["quick_gelu"] = "quick_gelu"

    def function(self) -> "Callable[[Tensor], Tensor]":
        from torch.nn import functional as F

        return lambda x: x * F.sigmoid(1.702 * x)


# -- feed-forward ---------------------------------------------------------------------------------------------------


class NoFeedForward(FeedForward):
    """No feed-forward sublayer."""

    kind: Literal["none"] = "none"

    def build(self, width: int) -> None:
        return None

    def cost(self, width: int, rows: int) -> Cost:
        return Cost()

    def describe(self) -> str:
        return "nothing"


class Plain(Network):
    """act(x W₁ + b₁) W₂ + b₂, at each position alike."""

    kind: Literal["plain"] = "plain"
    width: Size | None = None  # width of the hidden layer; None: 4 d
    activation: Activation = Relu()  # function between the two linear layers
    bias: Flag = True  # biases b₁ and b₂
    dropout: Probability = 0.0  # on the activations

    def describe(self) -> str:
        return "feed-forward"

    def join(self) -> "Callable[..., Tensor]":
        return self.activation.function()

    def network(self, width: int, hidden: int) -> "nn.Module":
        from anyformer.nn.feedforward import PlainFFN

        return PlainFFN(width, hidden, self.activation, self.bias, self.dropout)

    def network_matrices(self, width: int, hidden: int) -> Iterator[Matrix]:
        yield Matrix("up", width, hidden, bias=self.bias)
        yield Matrix("down", hidden, width, bias=self.bias)


class Gated(Network):
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
    gates: ClassVar[int] = 1

    def describe(self) -> str:
        return "gated feed-forward"

    def join(self) -> "Callable[..., Tensor]":
        from anyformer.nn.feedforward import join_gate, swiglu

        if isinstance(self.activation, Silu) and self.limit is None and not self.offset:
            return swiglu
        return partial(join_gate, act=self.activation.function(), limit=self.limit, offset=self.offset)

    def network(self, width: int, hidden: int) -> "nn.Module":
        from anyformer.nn.feedforward import GatedFFN

        return GatedFFN(width, hidden, self.join(), self.bias, self.dropout)

    def network_matrices(self, width: int, hidden: int) -> Iterator[Matrix]:
        yield Matrix("gate_up", width, 2 * hidden, bias=self.bias)
        yield Matrix("down", hidden, width, bias=self.bias)


# -- mixture of experts -----------------------------------------------------------------------------------------------


class Router(Part):
    """The rule that chooses and weights the experts of each token."""

    @abstractmethod
    def build(self, width: int, count: int, top_k: int) -> "nn.Module":
        """Return the module, from tokens [m, d] to a `Routing`."""

    @abstractmethod
    def cost(self, width: int, count: int, rows: int) -> Cost:
        """Return the cost for a number of tokens."""

    def faults(self, count: int, top_k: int) -> Iterator[Fault]:
        """Yield settings that do not fit a number of experts, `top_k` of which read each token."""
        yield from ()


class SoftmaxTopK(Router):
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

    def build(self, width: int, count: int, top_k: int) -> "nn.Module":
        from anyformer.nn.experts import SoftmaxRouter

        return SoftmaxRouter(self, width, count, top_k)

    def cost(self, width: int, count: int, rows: int) -> Cost:
        return replace(linear(width, count, rows, self.bias), saved=rows * count)  # probabilities

    def faults(self, count: int, top_k: int) -> Iterator[Fault]:
        return _group_faults(self, count, top_k)


class SigmoidTopK(Router):
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

    def build(self, width: int, count: int, top_k: int) -> "nn.Module":
        from anyformer.nn.experts import SigmoidRouter

        return SigmoidRouter(self, width, count, top_k)

    def cost(self, width: int, count: int, rows: int) -> Cost:
        return replace(linear(width, count, rows, False), saved=rows * count)  # probabilities

    def faults(self, count: int, top_k: int) -> Iterator[Fault]:
        return _group_faults(self, count, top_k)


def _group_faults(router: SoftmaxTopK | SigmoidTopK, count: int, top_k: int) -> Iterator[Fault]:
    """Yield groups that do not divide the experts, or that are too few to choose from."""
    groups, top = router.groups, router.top_groups
    if count % groups:
        yield Fault("groups", f"= {groups}: must divide count = {count}")
    elif top > groups:
        yield Fault("top_groups", f"= {top}: must be at most groups = {groups}")
    elif top * (count // groups) < top_k <= count:
        held = f"{top} of {groups} groups hold {top * (count // groups)} experts"
        yield Fault("top_groups", f"= {top}: {held}, fewer than top_k = {top_k}")


class Experts(FeedForward):
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

    def describe(self) -> str:
        return f"{self.count} experts, {self.top_k} for each token"

    def faults(self) -> Iterator[Fault]:
        if self.top_k > self.count:
            yield Fault("top_k", f"= {self.top_k}: must be at most count = {self.count}")
        if self.shared_gate and not self.shared:
            yield Fault("shared_gate", "= True: there are no shared experts; set shared, or leave this out")
        yield from (fault.under("router") for fault in self.router.faults(self.count, self.top_k))

    def build(self, width: int) -> "nn.Module":
        from torch import nn

        from anyformer.nn.experts import ExpertMixture, StackedLinear

        one, hidden = self.expert, self.expert.hidden(width)
        return ExpertMixture(
            self.router.build(width, self.count, self.top_k),
            StackedLinear(self.count, width, (hidden,) * (one.gates + 1), one.bias),
            StackedLinear(self.count, hidden, (width,), one.bias),
            one.join(),
            dropout=one.dropout,
            shared=one.network(width, self.shared * hidden) if self.shared else None,
            shared_gate=nn.Linear(width, 1, bias=False) if self.shared_gate else None,
            balance=self.balance,
        )

    def cost(self, width: int, rows: int) -> Cost:
        read, hidden = rows * self.top_k, self.expert.hidden(width)
        chosen = self.expert.network_cost(width, hidden, read)
        found = self.router.cost(width, self.count, rows) + replace(chosen, parameters=self.count * chosen.parameters)
        found += Cost(saved=2 * read * width)  # inputs and outputs of the experts
        if self.shared_gate:
            found += linear(width, 1, rows, bias=False)
        return found + self.expert.network_cost(width, self.shared * hidden, rows) if self.shared else found

    @property
    def hidden_network(self) -> Network:
        return self.expert

    @property
    def choices_per_token(self) -> int:
        return self.top_k

    def hidden_values(self, width: int) -> int:
        return self.expert.hidden(width) * (self.top_k + self.shared)

    def stacked_matrices(self, width: int) -> Iterator[tuple[int, Matrix]]:
        hidden = self.expert.hidden(width)
        yield self.count, Matrix("up", width, hidden * (1 + self.expert.gates))
        yield self.count, Matrix("down", hidden, width)

    def share(self, width: int, parts: int) -> Self:
        return self.model_copy(update={"expert": self.expert.share(width, parts)})

    def divided_sizes(self, width: int) -> Iterator[tuple[str, int, int]]:
        yield "count", self.count, self.count
        yield "shared", self.shared, self.shared * self.expert.hidden(width)

    def matrices(self, width: int) -> Iterator[Matrix]:
        if self.shared:
            hidden = self.shared * self.expert.hidden(width)
            yield from (matrix.under("shared") for matrix in self.expert.network_matrices(width, hidden))
