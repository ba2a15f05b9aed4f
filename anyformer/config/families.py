"""Families of parts, with the methods that each part has. Imports no torch.

A part is one frozen class: its fields, and the methods of its family. Its module is imported where it is built. To add
one, derive a class from its family and give it a `kind`: here, or in a file of your own (`part.py`).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from anyformer.config.cost import Cost, Matrix, Sizes, StateSizes, linear_costs
from anyformer.config.part import Part
from anyformer.config.spec import ConfigError, Fault, Size

if TYPE_CHECKING:
    from torch import Tensor, nn

    from anyformer.config.media import ImageSegment, Media, Spectrogram
    from anyformer.config.scheme import Position

Side = Literal["encoder", "decoder"]
Pool = Literal["first", "mean", "max", "last"]  # over the real tokens of a row
Labels = Size | Literal["auto"]  # auto: in a recipe, as many as the training rows have
# of a head: hidden states, the next token, the token itself, a label for each token, the bounds of a span, labels or a
# number for each row, a vector for each row
Output = Literal["none", "lm", "masked_lm", "token_labels", "span", "classifier", "embedder"]


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

    @property
    def hidden_network(self) -> "Network | None":
        """The network with the hidden values: itself, or each expert; None: there is none."""
        return None

    @property
    def choices_per_token(self) -> int:
        """How many of several such networks are chosen for a token."""
        return 1

    def hidden_values(self, width: int) -> int:
        """Return how many hidden values are computed for a token, without gates."""
        return 0

    def stacked_matrices(self, width: int) -> Iterator[tuple[int, Matrix]]:
        """Yield the linear layers that may have no adapter, and how many equal ones are in one weight."""
        yield from ()

    def share(self, width: int, parts: int) -> Self:
        """Return the part of the layer that one of several processes computes."""
        return self

    def divided_sizes(self, width: int) -> Iterator[tuple[str, int, int]]:
        """Yield the sizes that several processes divide: the field, its value, and the number to be divided."""
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

    @property
    def hidden_network(self) -> "Network":
        return self

    def hidden_values(self, width: int) -> int:
        return self.hidden(width)

    def share(self, width: int, parts: int) -> Self:
        return self.model_copy(update={"width": self.hidden(width) // parts})

    def divided_sizes(self, width: int) -> Iterator[tuple[str, int, int]]:
        yield "width", self.hidden(width), self.hidden(width)

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


class Mixer(Part):
    """The sublayer through which tokens read each other."""

    default_kind: ClassVar[str] = "attention"
    has_state: ClassVar[bool] = False  # reads one token after the other into a state, rather than keep tokens

    @abstractmethod
    def build(self, width: int) -> "nn.Module | None":
        """Return the module, which is called as `module(x, ctx)` with x [b, t, d]; None where there is none."""

    def stores(self, width: int) -> Sizes | StateSizes | None:
        """Return what one layer stores in a cache: keys and values of each token, or one state for each row.

        None: nothing, so a decoder with it reads the whole text again for each new token.
        """
        return None

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


class Input(Part):
    """The input of a stack: each place of it becomes a vector, to which positions are added."""

    default_kind: ClassVar[str] = "tokens"

    @abstractmethod
    def build(self, width: int, own_table: bool = True) -> "nn.Module":
        """Return the module, an `InputModule`; without `own_table` it shares the table of the other side's input."""

    @abstractmethod
    def cost(self, width: int, b: int, t: int, own_table: bool = True) -> Cost:
        """Return the cost for t places in each of b rows."""

    def inner_width(self, width: int) -> int:
        """Return the width of the vectors to which positions are added."""
        return width

    def table_width(self, width: int) -> int | None:
        """Return e, the width of a table [v, e] that the head may share; None: there is none."""
        return None

    def faults(self, width: int, side: Side, pair: bool) -> Iterator[Fault]:
        """Yield what does not fit together, or not into the model; `pair`: it has an encoder and a decoder."""
        yield from ()

    def reads(self, b: int, t: int) -> tuple[int, ...]:
        """Return the shape of what it reads for t places in each of b rows: ids, or floating-point values."""
        return b, t

    @property
    def rows(self) -> int:
        """v, the number of token ids; 0: it reads none."""
        return 0

    @property
    def shared_table(self) -> object:
        """The settings of the table, equal for two inputs that may share it; None: there is none."""
        return None

    @property
    def padding(self) -> int | None:
        """The row of the table that stays zero."""
        return None

    @property
    def length(self) -> int | None:
        """The number of places, where it is fixed."""
        return None

    @property
    def token_types(self) -> int:
        """The number of token types; 0: none."""
        return 0

    @property
    def spelled_bytes(self) -> int | None:
        """How many bytes of each word it reads; None: it reads tokens by their ids alone."""
        return None

    @property
    def stream(self) -> "Media | None":
        """The images, sounds and feature vectors that it reads between tokens."""
        return None

    @property
    def picture(self) -> "ImageSegment | None":
        """The image that it reads in place of tokens."""
        return None

    @property
    def sound(self) -> "Spectrogram | None":
        """The sound that it reads in place of tokens."""
        return None

    def for_width(self, base: int) -> Self | None:
        """Return the input with the scale of this width, whatever the model's; None: width transfer has no rule."""
        return None

    def share(self, n: int) -> Self:
        """Return the part of one of n processes that split the vocabulary."""
        return self


class IdInput(Input):
    """An input of token ids."""

    vocab: Size | None = None  # number of tokens; None: in a recipe, that of the tokenizer

    @property
    def rows(self) -> int:
        if self.vocab is None:
            raise ConfigError([Fault("vocab", "is not set: give it, or let a recipe's tokenizer do so")])
        return self.vocab

    def share(self, n: int) -> Self:
        return self.model_copy(update={"vocab": self.vocab and -(-self.vocab // n)})


class Head(Part):
    """The output layer: from the hidden states of the last stack to logits, labels or vectors."""

    output: ClassVar[Output] = "none"  # the kind of our head with outputs of the same form and meaning

    @abstractmethod
    def build(self, width: int, read: Input, tied: bool) -> "nn.Module":
        """Return the module, which is called as `module(hidden, layout, table)` with hidden [b, t, d].

        `read` is the input of the last stack; `tied`: the output table is its table, else `table` is unused.
        """

    @abstractmethod
    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        """Return the cost for t tokens in each of b rows."""

    @abstractmethod
    def values(self, width: int, vocab: int) -> int:
        """Return how many numbers the output has for each token, or for each row."""

    def table_width(self, width: int, read: Input) -> int | None:
        """Return e, the width of a table [v, e] that hidden states are multiplied with; None: there is none."""
        return None

    @property
    def predicts_tokens(self) -> bool:
        """True if its outputs are logits of tokens."""
        return self.output in ("lm", "masked_lm")

    @property
    def labelled(self) -> float:
        """The usual share of tokens that have a label."""
        return 0.15 if self.output == "masked_lm" else 1.0

    @property
    def per_row(self) -> bool:
        """True if a row has one output, not each of its tokens."""
        return self.output in ("classifier", "embedder")

    @property
    def pooling(self) -> Pool | None:
        """How the vectors of a row become one, if they do."""
        return None

    @property
    def joint(self) -> bool:
        """True if it scores the labels of a row jointly, so that a token alone has no distribution."""
        return False

    @property
    def further(self) -> int:
        """How many tokens after the next one it predicts, too."""
        return 0

    @property
    def soft_cap(self) -> float | None:
        """The bound of its logits."""
        return None

    @property
    def learns_length(self) -> bool:
        """True if its vectors have a learned length, by which cosines are divided by a learned temperature."""
        return False

    def for_images(self, pool: Pool, width: int) -> "Head | None":
        """Return the head of an image tower whose vectors are compared with this one's; None: there is none."""
        return None

    def for_width(self, base: int, ratio: float) -> Self | None:
        """Return the head with the scale of width `base` times `ratio`; None: width transfer has no rule."""
        return None


class LabelHead(Head):
    """A head with a logit for each label."""

    labels: Labels  # number of labels; auto: in a recipe, that of the data

    @property
    def count(self) -> int:
        """The number of labels, once it is known."""
        if self.labels == "auto":
            what = "= 'auto': only a recipe counts the labels of its data: set a number"
            raise ConfigError([Fault("head.labels", what)])
        return self.labels


def must_divide(name: str, value: int, width: int, instead: str, times: int = 1) -> Fault:
    """Return the fault of a number of heads that does not divide the width of the model."""
    what = "width" if times == 1 else f"{times} · width"
    return Fault(name, f"= {value}: must divide {what} = {times * width}, or give {instead}")
