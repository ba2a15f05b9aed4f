"""Mixers with a matrix state per head: linear attention, the gated delta rule, Mamba-2. Imports no torch.

A token changes the state and reads it: cost and memory per token do not depend on the length of the text. They read
from left to right, in an encoder too.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from anyformer.config.attention import Heads
from anyformer.config.cost import Cost, Matrix, StateSizes, linear_costs
from anyformer.config.families import Mixer, Side, must_divide
from anyformer.config.norm import RMSNorm, TokenNorm
from anyformer.config.spec import BY_KIND, Count, Fault, Flag, Positive, Size, Spec

if TYPE_CHECKING:
    from torch import nn

CHUNK = 128  # tokens: the larger of those of `kernels/chunked_recurrence.py`
SUM_COLUMNS = 8  # of v: one of ones, whose output is the sum of weights, and zeros, since tensor cores read 8 at a time


class NoDecay(Spec):
    """The state keeps everything: a factor of 1."""

    kind: Literal["none"] = "none"


class ChannelDecay(Spec):
    """a_t = σ(x W₁ W₂ + b)^(1/temperature) for each key channel, at least exp(-5) (GLA, Yang et al. 2024)."""

    kind: Literal["channel"] = "channel"
    rank: Size = 16  # width between W₁ and W₂
    temperature: Positive = 16.0  # larger: slower decay


Decay = Annotated[NoDecay | ChannelDecay, *BY_KIND]


class StateMixer(Mixer):
    """A mixer with a matrix state for each head.

    FLOPs are those of the recurrence by its definition, 2·k·v for each matmul of a token with a state: one writes and
    one reads, and the delta rule reads once more before. The chunked form, which trains, computes more, by a factor
    that does not depend on the length.
    """

    has_state: ClassVar[bool] = True
    matmuls: ClassVar[int] = 2  # of a token with a state
    shift: ClassVar[bool] = False  # the convolution has biases

    if TYPE_CHECKING:  # a field of each, in its own order

        @property
        def heads(self) -> int: ...

    def describe(self, across: bool = False) -> str:
        return f"{self.part}, {self.heads} heads"

    @abstractmethod
    def stores(self, width: int) -> StateSizes:
        """Return the state of each row, and the inputs of its convolution."""

    @abstractmethod
    def other_cost(self, width: int, b: int, t: int) -> Cost:
        """Return the cost of all but linear layers, the state and its convolution."""

    def cost(self, width: int, b: int, t: int, side: Side) -> Cost:
        h, k, v, channels, tail, _ = self.stores(width)
        chunks = -(-t // CHUNK)
        cost = linear_costs(self.matrices(width), b * t) + self.other_cost(width, b, t)
        # outputs, and the state before each chunk
        cost += Cost(flops=2 * self.matmuls * b * t * h * k * v, saved=b * h * v * (t + chunks * k))
        if channels:  # elementwise, no FLOPs by the rule; saved are its input, and that of SiLU
            cost += Cost(channels * (tail + 1 + self.shift), saved=2 * b * t * channels)
        return cost + (Cost(cached=b * tail * channels, states=b * h * k * v) if side == "decoder" else Cost())


class LinearAttention(StateMixer):
    """S_t = a_t S_{t-1} + φ(k_t) v_tᵀ, o_t = S_tᵀ φ(q_t): attention without a softmax (Katharopoulos et al. 2020).

    With a decay, a norm of the heads and a gate it is gated linear attention (GLA).
    """

    kind: Literal["linear_attention"] = "linear_attention"
    heads: Heads  # number of heads, each with a state
    key_width: Size | None = None  # width of a head's queries and keys; None: d / heads
    value_width: Size | None = None  # width of a head's values; None: key_width
    features: Literal["elu", "none"] = "elu"  # φ of queries and keys; elu: elu(x) + 1, above 0; none: x
    # sum: o_t is divided by the sum of its weights, Σ φ(q_t)·φ(k); none: queries are scaled by 1/sqrt(k)
    normalizer: Literal["sum", "none"] = "sum"
    decay: Decay = NoDecay()  # how the state forgets
    convolution: Count = 0  # tokens of a short causal convolution of q, k and v, with SiLU after it; 0: none
    norm: TokenNorm = TokenNorm.none()  # of each head's output
    gate: Flag = False  # the heads are multiplied by silu(x W)
    part: ClassVar = "linear attention"

    def widths(self, width: int) -> tuple[int, int]:
        """Head width of queries and keys, and of values, given or derived."""
        key = self.key_width or width // self.heads
        return key, self.value_width or key

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.state_mixers.linear_attention import LinearAttentionMixer

        return LinearAttentionMixer(self, width)

    def stores(self, width: int) -> StateSizes:
        h, (k, k_v), conv = self.heads, self.widths(width), self.convolution
        channels, tail = (h * (2 * k + k_v), conv - 1) if conv else (0, 0)
        return StateSizes(h, k, k_v + SUM_COLUMNS * (self.normalizer == "sum"), channels, tail)

    def matrices(self, width: int) -> Iterator[Matrix]:
        h, (k, k_v) = self.heads, self.widths(width)
        yield Matrix("qkv", width, h * (2 * k + k_v * (1 + self.gate)))
        if isinstance(self.decay, ChannelDecay):
            yield Matrix("decay_down", width, self.decay.rank)
            yield Matrix("decay_up", self.decay.rank, h * k, bias=True)
        yield Matrix("out", h * k_v, width)

    def other_cost(self, width: int, b: int, t: int) -> Cost:
        h, (k, k_v), rows, columns = self.heads, self.widths(width), b * t, self.stores(width).value_width
        cost = Cost(saved=rows * h * (2 * k + columns + 2 * k_v * self.gate + k_v)) + self.norm.cost(k_v, rows * h)
        return cost + Cost(saved=rows * (self.decay.rank + h * k)) if isinstance(self.decay, ChannelDecay) else cost

    def faults(self, width: int, side: Side, has_encoder: bool) -> Iterator[Fault]:
        if not self.key_width and width % self.heads:
            yield must_divide("heads", self.heads, width, "key_width")
        if self.normalizer == "sum" and self.features == "none":
            what = "weights of any sign may add up to 0; use normalizer = 'none', or features = 'elu'"
            yield Fault("normalizer", f"= 'sum': {what}")


class GatedDelta(StateMixer):
    """Gated DeltaNet (Yang et al. 2024): S_t = a_t S_{t-1} + k_t r_t (v_t - (a_t S_{t-1})ᵀ k_t)ᵀ, o_t = S_tᵀ q_t.

    The value stored under a key is replaced, by the share r_t = σ(x W_r), rather than added to. a_t =
    exp(-A softplus(x W_a + b)) for each head; q and k have norm 1; the heads are normed and gated.
    """

    kind: Literal["gated_delta"] = "gated_delta"
    heads: Heads  # number of value heads, each with a state
    key_heads: Heads | None = None  # number of heads of queries and keys; None: heads; fewer: each serves several
    key_width: Size | None = None  # width of a head's queries and keys; None: d / heads
    value_width: Size | None = None  # width of a head's values; None: key_width
    convolution: Size = 4  # tokens of the short causal convolution of q, k and v; 1: none before the token itself
    norm: TokenNorm = RMSNorm()  # of each head's output
    matmuls: ClassVar[int] = 3
    part: ClassVar = "gated delta rule"

    @property
    def groups(self) -> int:
        """Heads of queries and keys, given or derived."""
        return self.key_heads or self.heads

    def widths(self, width: int) -> tuple[int, int]:
        """Head width of queries and keys, and of values, given or derived."""
        key = self.key_width or width // self.heads
        return key, self.value_width or key

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.state_mixers.gated_delta import GatedDeltaMixer

        return GatedDeltaMixer(self, width)

    def stores(self, width: int) -> StateSizes:
        h, (k, k_v) = self.heads, self.widths(width)
        return StateSizes(h, k, k_v, 2 * self.groups * k + h * k_v, self.convolution - 1)

    def matrices(self, width: int) -> Iterator[Matrix]:
        h, (k, k_v) = self.heads, self.widths(width)
        yield Matrix("qkvz", width, 2 * (self.groups * k + h * k_v))
        yield Matrix("rates", width, 2 * h)
        yield Matrix("out", h * k_v, width)

    def other_cost(self, width: int, b: int, t: int) -> Cost:
        h, (_, k_v), rows, channels = self.heads, self.widths(width), b * t, self.stores(width).channels
        saved = rows * (2 * h + channels + 3 * h * k_v)
        return Cost(2 * h, saved=saved) + self.norm.cost(k_v, rows * h)

    def faults(self, width: int, side: Side, has_encoder: bool) -> Iterator[Fault]:
        if not self.key_width and width % self.heads:
            yield must_divide("heads", self.heads, width, "key_width")
        if self.heads % self.groups:
            yield Fault("key_heads", f"= {self.key_heads}: must divide heads = {self.heads}")


class Mamba2(StateMixer):
    """Mamba-2 (Dao & Gu 2024): S_t = exp(-A Δ_t) S_{t-1} + B_t (Δ_t x_t)ᵀ, o_t = S_tᵀ C_t + D x_t.

    x, B and C are short convolutions of projections of the input, Δ_t = softplus(x W + b) is a number per head. The
    heads are gated, then normed together.
    """

    kind: Literal["mamba2"] = "mamba2"
    heads: Heads  # number of heads, each with a state
    head_width: Size | None = None  # width of a head's x; None: 2 d / heads
    state: Size = 128  # width of B and C: the state of a head is state × head_width
    groups: Heads = 1  # number of B and C; each serves heads / groups heads
    convolution: Size = 4  # tokens of the short causal convolution of x, B and C; 1: none before the token itself
    norm: TokenNorm = RMSNorm()  # of all heads together, after the gate
    shift: ClassVar[bool] = True
    part: ClassVar = "Mamba-2"

    def inner_width(self, width: int) -> int:
        """Width of all heads together, given or derived."""
        return self.heads * (self.head_width or 2 * width // self.heads)

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.state_mixers.mamba2 import Mamba2Mixer

        return Mamba2Mixer(self, width)

    def stores(self, width: int) -> StateSizes:
        h, n, inner = self.heads, self.state, self.inner_width(width)
        return StateSizes(h, n, inner // h, inner + 2 * self.groups * n, self.convolution - 1)

    def matrices(self, width: int) -> Iterator[Matrix]:
        inner = self.inner_width(width)
        yield Matrix("inputs", width, 2 * (inner + self.groups * self.state) + self.heads)
        yield Matrix("out", inner, width)

    def other_cost(self, width: int, b: int, t: int) -> Cost:
        h, inner, rows, channels = self.heads, self.inner_width(width), b * t, self.stores(width).channels
        return Cost(3 * h, saved=rows * (2 * h + channels + 3 * inner)) + self.norm.cost(inner, rows)

    def faults(self, width: int, side: Side, has_encoder: bool) -> Iterator[Fault]:
        if not self.head_width and 2 * width % self.heads:
            yield must_divide("heads", self.heads, width, "head_width", times=2)
        if self.heads % self.groups:
            yield Fault("groups", f"= {self.groups}: must divide heads = {self.heads}")
