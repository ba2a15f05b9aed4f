"""Norms. Imports no torch."""

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from anyformer.config.cost import Cost
from anyformer.config.part import Part
from anyformer.config.spec import Flag, Fraction, Number, Positive

if TYPE_CHECKING:
    from torch import nn


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

    def build_each(self, heads: int, width: int) -> "nn.Module":
        """Return the module for queries or keys [b, h, t, k], with separate weights for each head."""
        raise ValueError(f"qk_norm '{self.kind}' has no form with separate weights for each head: use 'head'")


class NoNorm(TokenNorm):
    """The identity."""

    kind: Literal["none"] = "none"

    def build(self, width: int) -> "nn.Module":
        from torch import nn

        return nn.Identity()

    def cost(self, width: int, rows: int) -> Cost:
        return Cost()


class LayerNorm(TokenNorm):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β over the last axis (Ba et al. 2016)."""

    kind: Literal["layer"] = "layer"
    eps: Positive = 1e-5  # added to the variance, so that the division stays finite
    bias: Flag = True  # a learned shift β
    narrows: ClassVar[bool] = True

    def build(self, width: int) -> "nn.Module":
        from torch import nn

        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)

    def build_each(self, heads: int, width: int) -> "nn.Module":
        from anyformer.nn.norm import HeadNorm

        return HeadNorm(heads, width, self.eps, centred=True, bias=self.bias, offset=0.0, cast_first=False)

    def cost(self, width: int, rows: int) -> Cost:
        return Cost(width * (1 + self.bias), saved=rows * width)


class RMSNorm(TokenNorm):
    """x / sqrt(E[x²] + eps) · (offset + γ) (Zhang & Sennrich 2019); Gemma's offset is 1.

    `cast` says where the fp32 result returns to the input's precision: before γ (Llama, T5) or after it (Gemma).
    """

    kind: Literal["rms"] = "rms"
    eps: Positive = 1e-6  # added to the mean square, so that the division stays finite
    offset: Number = 0.0  # constant added to γ (Gemma: 1)
    # where fp32 returns to the input's precision: before or after γ
    cast: Literal["before_scale", "after_scale"] = "before_scale"
    narrows: ClassVar[bool] = True

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.norm import RootMeanSquare

        return RootMeanSquare(width, self.eps, self.offset, self.cast == "before_scale")

    def build_each(self, heads: int, width: int) -> "nn.Module":
        from anyformer.nn.norm import HeadNorm

        first = self.cast == "before_scale"
        return HeadNorm(heads, width, self.eps, centred=False, bias=False, offset=self.offset, cast_first=first)

    def cost(self, width: int, rows: int) -> Cost:
        return Cost(width, saved=rows * width)

    def saves(self, compiled: bool) -> int:
        return 1 if compiled else 2  # eager: what it normalised, too


class BatchNorm(Norm):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β, each feature over the real tokens of a batch (Ioffe & Szegedy 2015).

    In training every token thus depends on all others, also on later ones. In evaluation, running statistics replace
    those of the batch, and each token is normalised separately.
    """

    kind: Literal["batch"] = "batch"
    eps: Positive = 1e-5  # added to the variance, so that the division stays finite
    momentum: Fraction = 0.1  # how far a step of training moves the running statistics towards its batch's

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.norm import OverBatch

        return OverBatch(width, self.eps, self.momentum)

    def cost(self, width: int, rows: int) -> Cost:
        return Cost(2 * width, saved=rows * width)


class DynamicTanh(Norm):
    """tanh(α x) · γ + β with one learned α: no statistics, each value is squashed alone (DyT, Zhu et al. 2025)."""

    kind: Literal["tanh"] = "tanh"
    alpha: Positive = 0.5  # initial α; larger values squash more

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.norm import ScaledTanh

        return ScaledTanh(width, self.alpha)

    def cost(self, width: int, rows: int) -> Cost:
        return Cost(2 * width + 1, saved=rows * width)

    def saves(self, compiled: bool) -> int:
        return 1 if compiled else 2  # eager: its output before γ, too
