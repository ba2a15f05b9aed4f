"""Mixers with a matrix state per head: linear attention, the gated delta rule, Mamba-2. Imports no torch.

A token changes the state and reads it: cost and memory per token do not depend on the length of the text. They read
from left to right, in an encoder too.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from anyformer.config.norm import NoNorm, RMSNorm, TokenNorm
from anyformer.config.spec import BY_KIND, Count, Fault, Flag, Positive, Size, Spec

MAX_HEADS = 65_536
Heads = Annotated[int, Field(strict=True, ge=1, le=MAX_HEADS)]


class NoDecay(Spec):
    """The state keeps everything: a factor of 1."""

    kind: Literal["none"] = "none"


class ChannelDecay(Spec):
    """a_t = σ(x W₁ W₂ + b)^(1/temperature) for each key channel, at least exp(-5) (GLA, Yang et al. 2024)."""

    kind: Literal["channel"] = "channel"
    rank: Size = 16  # width between W₁ and W₂
    temperature: Positive = 16.0  # larger: slower decay


Decay = Annotated[NoDecay | ChannelDecay, *BY_KIND]


class StateMixer(Spec):
    """A mixer with a matrix state for each head."""

    def faults(self, width: int) -> Iterator[Fault]:
        """Yield the faults of its sizes in a model of this width."""
        raise NotImplementedError


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
    norm: TokenNorm = NoNorm()  # of each head's output
    gate: Flag = False  # the heads are multiplied by silu(x W)

    def widths(self, width: int) -> tuple[int, int]:
        """Head width of queries and keys, and of values, given or derived."""
        key = self.key_width or width // self.heads
        return key, self.value_width or key

    def faults(self, width: int) -> Iterator[Fault]:
        if not self.key_width and width % self.heads:
            yield Fault("heads", f"= {self.heads}: must divide width = {width}, or give key_width")
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

    @property
    def groups(self) -> int:
        """Heads of queries and keys, given or derived."""
        return self.key_heads or self.heads

    def widths(self, width: int) -> tuple[int, int]:
        """Head width of queries and keys, and of values, given or derived."""
        key = self.key_width or width // self.heads
        return key, self.value_width or key

    def faults(self, width: int) -> Iterator[Fault]:
        if not self.key_width and width % self.heads:
            yield Fault("heads", f"= {self.heads}: must divide width = {width}, or give key_width")
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

    def inner_width(self, width: int) -> int:
        """Width of all heads together, given or derived."""
        return self.heads * (self.head_width or 2 * width // self.heads)

    def faults(self, width: int) -> Iterator[Fault]:
        if not self.head_width and 2 * width % self.heads:
            yield Fault("heads", f"= {self.heads}: must divide 2 · width = {2 * width}, or give head_width")
        if self.heads % self.groups:
            yield Fault("groups", f"= {self.groups}: must divide heads = {self.heads}")
