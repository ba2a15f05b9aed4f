"""Families of parts within a block, with the methods that each part has. Imports no torch.

A part is one frozen class: its fields, and the methods of its family. Its module is imported where it is built. To add
one, derive a class from its family and give it a `kind`: here, or in a file of your own (`part.py`).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from anyformer.config.cost import Cost, Matrix, Sizes, StateSizes, linear_costs
from anyformer.config.part import Part
from anyformer.config.spec import Fault

if TYPE_CHECKING:
    from torch import Tensor, nn

    from anyformer.config.scheme import Position

Side = Literal["encoder", "decoder"]


class Norm(Part):
    """A function of each token's vector that keeps its size, before or after a sublayer."""

    narrows: ClassVar[bool] = False  # compiled in half precision, its input is saved in that precision

    @abstractmethod
    def build(self, width: int) -> "nn.Module":
        """Return the module of the norm over vectors of this width."""

    @abstractmethod
    def cost(self, width: int, rows: int) -> Cost:
        """Return the cost of the norm for a number of vectors."""

    def saves(self, compiled: bool) -> int:
        """Return how many tensors of its input's size are saved for the backward pass."""
        return 1


class TokenNorm(Norm):
    """A norm that depends on one vector alone: for the heads of attention, and other vectors within a part."""


class Activation(Part):
    """A function of each number."""

    saves_input: ClassVar[bool] = True  # the backward pass needs the input, not only the output

    @abstractmethod
    def function(self) -> "Callable[[Tensor], Tensor]":
        """Return the function."""

    @property
    def fused(self) -> str | None:
        """Name of the kernel that computes it with the matmul before it; None: there is none."""
        return None


class FeedForward(Part):
    """The sublayer that transforms each token on its own."""

    @abstractmethod
    def build(self, width: int) -> "nn.Module | None":
        """Return the module, which is called as `module(x, ctx)` with x [b, t, d]; None where there is none."""

    @abstractmethod
    def cost(self, width: int, rows: int) -> Cost:
        """Return the cost for a number of tokens, without that of saving its input."""

    def matrices(self, width: int) -> Iterator[Matrix]:
        """Yield the linear layers that may have an adapter."""
        yield from ()

    def describe(self) -> str:
        """Return a short description."""
        return self.kind.replace("_", " ")

    def faults(self) -> Iterator[Fault]:
        """Yield settings that do not fit together."""
        yield from ()


class Network(FeedForward):
    """A feed-forward network with one hidden layer, which may also be an expert or shared by experts."""

    gates: ClassVar[int] = 0  # hidden vectors beside the one that is passed on

    if TYPE_CHECKING:  # fields of every network, each in its own order
        width: int | None
        activation: Activation
        bias: bool
        dropout: float

    def hidden(self, width: int) -> int:
        """Return the width of the hidden layer, given or derived."""
        return self.width or 4 * width

    @abstractmethod
    def join(self) -> "Callable[..., Tensor]":
        """Return the function from the hidden vectors, gates first, to the one that is passed on."""

    @abstractmethod
    def network(self, width: int, hidden: int) -> "nn.Module":
        """Return the module with a hidden layer of this width."""

    def build(self, width: int) -> "nn.Module":
        return self.network(width, self.hidden(width))

    def cost(self, width: int, rows: int) -> Cost:
        return self.network_cost(width, self.hidden(width), rows)

    def matrices(self, width: int) -> Iterator[Matrix]:
        return self.network_matrices(width, self.hidden(width))

    def network_cost(self, width: int, hidden: int, rows: int) -> Cost:
        """Return the cost with a hidden layer of this width."""
        found = linear_costs(self.network_matrices(width, hidden), rows)
        return found + Cost(saved=rows * hidden * (1 + 2 * self.gates + self.activation.saves_input))

    @abstractmethod
    def network_matrices(self, width: int, hidden: int) -> Iterator[Matrix]:
        """Yield the linear layers with a hidden layer of this width."""


class Router(Part):
    """The rule that chooses and weights the experts of each token."""

    @abstractmethod
    def build(self, width: int, count: int, top_k: int) -> "nn.Module":
        """Return the module, from tokens [m, d] to a `Choice`."""

    @abstractmethod
    def cost(self, width: int, count: int, rows: int) -> Cost:
        """Return the cost for a number of tokens."""

    def faults(self, count: int, top_k: int) -> Iterator[Fault]:
        """Yield settings that do not fit a number of experts, `top_k` of which read each token."""
        yield from ()


class Mixer(Part):
    """The sublayer through which tokens read each other."""

    default_kind: ClassVar[str] = "attention"
    has_state: ClassVar[bool] = False  # reads one token after the other into a state, rather than keep tokens

    @abstractmethod
    def build(self, width: int) -> "nn.Module | None":
        """Return the module, which is called as `module(x, ctx)` with x [b, t, d]; None where there is none."""

    @abstractmethod
    def stores(self, width: int) -> Sizes | StateSizes:
        """Return what one layer stores in a cache: keys and values of each token, or one state for each row."""

    @abstractmethod
    def cost(self, width: int, b: int, t: int, side: Side) -> Cost:
        """Return the cost for t tokens in each of b rows, without that of saving its input."""

    def matrices(self, width: int) -> Iterator[Matrix]:
        """Yield the linear layers that may have an adapter."""
        yield from ()

    def faults(self, width: int, side: Side, has_encoder: bool) -> Iterator[Fault]:
        """Yield what does not fit together, or not into a model of this width; `has_encoder`: the model has one."""
        yield from ()

    @property
    def ends(self) -> list[tuple[int, str]]:
        """Limits on the number of positions with their causes."""
        return []

    @property
    def part(self) -> str:
        """Name in counts."""
        return self.kind.replace("_", " ")

    def describe(self, across: bool = False) -> str:
        """Return a short description; `across`: of a cross-attention."""
        return self.part

    def reads_back(self, side: Side) -> bool:
        """Return whether it reads only earlier tokens."""
        return True

    def on(self, side: Side) -> Self:
        """Return the mixer for one side: settings that follow from the side are set."""
        return self

    def with_position(self, position: "Position") -> Self:
        """Return the mixer with the scheme of its stack, if it takes one and has none."""
        return self


def must_divide(name: str, value: int, width: int, instead: str, times: int = 1) -> Fault:
    """Return the fault of a number of heads that does not divide the width of the model."""
    what = "width" if times == 1 else f"{times} · width"
    return Fault(name, f"= {value}: must divide {what} = {times * width}, or give {instead}")
