"""Mixers other than attention: what lets tokens read each other. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from anyformer.config.cost import Cost, Matrix, Sizes, linear, linear_costs
from anyformer.config.families import Mixer as Mixer, Side
from anyformer.config.spec import Fault, Flag, Size
from anyformer.config.state_mixer import StateMixer as StateMixer  # all mixers are known where this file is imported

if TYPE_CHECKING:
    from torch import nn


class Recurrent(Mixer):
    """h_t = f(W x_t + U h_{t-1} + b): the state is reset at every segment; padding does not change it.

    rnn: f = tanh (Elman 1990) · lstm: Hochreiter & Schmidhuber 1997 · gru: Cho et al. 2014; with torch's two biases.
    """

    kind: Literal["recurrent"] = "recurrent"
    cell: Literal["rnn", "lstm", "gru"] = "gru"  # the recurrence: a plain RNN, an LSTM or a GRU
    width: Size | None = None  # width of the state h; None: d
    both_ways: Flag = False  # in an encoder: a second cell reads from the end
    begin: Literal["zero", "encoder"] = "zero"  # encoder: where the encoder's layer of the same number ended (forward)
    has_state: ClassVar[bool] = True
    part: ClassVar = "recurrence"

    def describe(self, across: bool = False) -> str:
        return self.cell.upper()

    def reads_back(self, side: Side) -> bool:
        return not self.both_ways

    def hidden(self, width: int) -> int:
        """Return the width of h, given or derived."""
        return self.width or width

    def state(self, width: int) -> int:
        """Return the size of the state of a cell: h, and in an LSTM c."""
        return self.hidden(width) * {"lstm": 2, "gru": 1, "rnn": 1}[self.cell]

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.recurrent import RecurrentMixer

        return RecurrentMixer(self, width)

    def stores(self, width: int) -> Sizes:
        return Sizes(1, self.hidden(width), self.state(width) - self.hidden(width))  # h, and c

    def matrices(self, width: int) -> Iterator[Matrix]:
        if self.both_ways or self.hidden(width) != width:
            yield Matrix("out", self.hidden(width) * (2 if self.both_ways else 1), width)

    def cost(self, width: int, b: int, t: int, side: Side) -> Cost:
        d, h, directions = width, self.hidden(width), 2 if self.both_ways else 1
        gates, saved = {"rnn": (1, 1), "lstm": (4, 7), "gru": (3, 5)}[self.cell]  # saved: gates, their factors, states
        cells = Cost(directions * gates * h * (d + h + 2), directions * 2 * b * t * gates * h * (d + h))
        cached = self.stores(d).cached(b, t) * (side == "decoder")
        return cells + linear_costs(self.matrices(d), b * t) + Cost(saved=b * t * directions * saved * h, cached=cached)

    def faults(self, width: int, side: Side, has_encoder: bool) -> Iterator[Fault]:
        if self.both_ways and side == "decoder":
            yield Fault("both_ways", "= True: a decoder reads in one direction; only an encoder reads both ways")
        if self.begin == "encoder" and (side == "encoder" or not has_encoder):
            yield Fault("begin", "= 'encoder': there is no encoder before this layer; leave begin out")


class Directed(Mixer):
    """Base of mixers whose direction may be left open: causal in a decoder, else not."""

    if TYPE_CHECKING:  # a field of each, in its own order

        @property
        def causal(self) -> bool | None: ...

    def reads_back(self, side: Side) -> bool:
        return side == "decoder" if self.causal is None else self.causal

    def on(self, side: Side) -> Self:
        return self.model_copy(update={"causal": self.reads_back(side)})

    def faults(self, width: int, side: Side, has_encoder: bool) -> Iterator[Fault]:
        if side == "decoder" and not self.reads_back(side):
            yield Fault("causal", "= False: a decoder never reads later tokens; leave causal out")


class Convolution(Directed):
    """y_t = Σ_j W_j x_{t + j·dilation - before}, j < width: a token reads its neighbours by distance.

    Causal: all before it, and itself; else centred. Beyond the ends of a segment there is zero.
    """

    kind: Literal["convolution"] = "convolution"
    width: Size = 3  # kernel width: number of tokens that it reads
    dilation: Size = 1  # distance between two tokens that it reads
    causal: Flag | None = None  # reads no later token; None: in a decoder
    bias: Flag = True  # a bias per channel

    def before(self, causal: bool) -> int:
        """Return the distance from a token to the first of its K tokens."""
        span = self.dilation * (self.width - 1)
        return span if causal else span // 2

    def describe(self, across: bool = False) -> str:
        return f"convolution over {self.width} tokens"

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.convolution import ConvolutionMixer

        return ConvolutionMixer(self, width)

    def stores(self, width: int) -> Sizes:
        return Sizes(1, width, 0, self.before(causal=True))

    def cost(self, width: int, b: int, t: int, side: Side) -> Cost:
        cached = self.stores(width).cached(b, t) * (side == "decoder")
        return replace(linear(self.width * width, width, b * t, self.bias), saved=0, cached=cached)


class FixedLength(Directed):
    """Base of mixers with weights for each position, of which there are `length`."""

    if TYPE_CHECKING:

        @property
        def length(self) -> int: ...

    @property
    def ends(self) -> list[tuple[int, str]]:
        return [(self.length, f"positions of the '{self.kind}' mixer")]

    def stores(self, width: int) -> Sizes:
        return Sizes(1, width, 0)  # what it read


class FullyConnected(FixedLength):
    """One dense layer over all numbers of a sequence: y_p = Σ_r W_pr x_r + b_p, each W_pr its own d×d matrix."""

    kind: Literal["dense"] = "dense"
    length: Size  # number of positions: longer inputs are an error
    causal: Flag | None = None  # reads no later token; None: in a decoder
    bias: Flag = True  # a bias per position and channel

    def describe(self, across: bool = False) -> str:
        return "one matrix over all positions"

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.dense import DenseMixer

        return DenseMixer(self, width)

    def cost(self, width: int, b: int, t: int, side: Side) -> Cost:
        cached = self.stores(width).cached(b, t) * (side == "decoder")
        size = self.length * width
        return Cost(size * (size + self.bias), 2 * b * (t * width) ** 2, cached=cached)


class PositionMixing(FixedLength):
    """y_p = Σ_r w_pr x_r + b_p: one number for each pair of positions, the same for all channels (MLP-Mixer 2021)."""

    kind: Literal["positions"] = "positions"
    length: Size  # number of positions: longer inputs are an error
    causal: Flag | None = None  # reads no later token; None: in a decoder
    bias: Flag = True  # a bias per position

    def describe(self, across: bool = False) -> str:
        return "mixing of positions"

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.dense import PositionMixer

        return PositionMixer(self)

    def cost(self, width: int, b: int, t: int, side: Side) -> Cost:
        cached = self.stores(width).cached(b, t) * (side == "decoder")
        return Cost(self.length * (self.length + self.bias), 2 * b * t * t * width, cached=cached)


class NoMixer(Mixer):
    """No token reads another: with it everywhere, a language model is a bigram model."""

    kind: Literal["none"] = "none"

    def describe(self, across: bool = False) -> str:
        return "nothing"

    def build(self, width: int) -> None:
        return None

    def stores(self, width: int) -> Sizes:
        return Sizes(0, 0, 0)

    def cost(self, width: int, b: int, t: int, side: Side) -> Cost:
        return Cost()
